"""What `auto` does next: pure rules over numbers. No torch, no clock, no files and no model in here.

`cost_model` knows what steps take, `acceptance` how often drafts are accepted, `draft_length` how far drafting pays,
`regret_budget` how much time may be lost, and `choose_drafter` decides.
"""
