"""Training: LayerSkip's recipe, AdaDecode's exit heads, their data, and what both need."""
