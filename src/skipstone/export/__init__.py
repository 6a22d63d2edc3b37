"""What LayerSkip and the layer search learnt, as files for engines that know no early exits: draft models and GGUF files."""
