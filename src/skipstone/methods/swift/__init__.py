"""SWIFT: on-the-fly self-speculative decoding (arXiv 2410.06916)."""
