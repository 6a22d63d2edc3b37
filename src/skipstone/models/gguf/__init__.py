"""Models in GGUF files: the format, the architectures' parameters and tensors, and loading through transformers."""
