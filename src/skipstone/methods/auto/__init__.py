"""`auto`: the fastest lossless way that a model, a text and a machine allow, chosen while decoding."""
