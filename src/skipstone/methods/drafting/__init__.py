"""What several methods share.

chain: the loop that drafts token by token. confidence: when to stop drafting. draft_model: drafting with a second model.
sublayer_skipping: drafting without some sublayers. lookups: drafts that are known beforehand. method_states: what methods learn
from request to request. replay: what a part of the target would have said. layer_sets: sets of sublayers, and their files.
"""
