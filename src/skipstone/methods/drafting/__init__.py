"""Code that several methods share.

chain: drafts token by token. confidence: decides when to stop drafting. draft_model: drafts with a second model.
sublayer_skipping: drafts without some sublayers. lookups: drafts from known texts. method_states: what methods learn across
requests. replay: evaluates a part of the target on committed tokens. layer_sets: sets of skipped sublayers, and their files.
"""
