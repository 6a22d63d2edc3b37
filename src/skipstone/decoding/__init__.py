"""The one decoding loop and the nouns that it speaks: noise, sampling, verification, drafts, steps, sessions."""
