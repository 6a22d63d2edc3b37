"""Whether drafting pays, with what and for how long: pure rules over measured costs. No torch, no clock, no model in here.

price.py turns costs, acceptance and a price of time into thresholds, lengths and trees. calibrate.py learns how often drafts
are accepted, ledger.py bounds what may be lost against plain decoding, costs.py what steps cost. Every state is frozen, and a
fold."""
