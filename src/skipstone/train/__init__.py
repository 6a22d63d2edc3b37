"""Training: the LayerSkip recipe, its trainer and its data."""
