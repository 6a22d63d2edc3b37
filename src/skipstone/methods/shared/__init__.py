"""What several methods share.

chain: the loop that drafts token by token. confidence: when to stop drafting. draft_model: drafting with a second model.
skipping: drafting without some sublayers. lookups: drafts that are known beforehand. states: what methods learn from
request to request. hindsight: what a part of the target would have said. layer_sets: sets of sublayers, and their files.
"""
