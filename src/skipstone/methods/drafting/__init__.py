"""Code that several methods share.

chain: drafts token by token. chain_stop_rule: decides when to stop drafting. draft_model: drafts with a second model.
sublayer_skipping: drafts without some sublayers. lookups: drafts from known texts. candidates: costs that `auto` assumes at
first. shortlist: drafts from a part of the vocabulary. layer_sets: sets of skipped sublayers, and their files.
"""
