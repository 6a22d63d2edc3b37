"""Training of AdaDecode's exit heads."""
