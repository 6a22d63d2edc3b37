"""LayerSkip's training recipe, its loss and its trainer."""
