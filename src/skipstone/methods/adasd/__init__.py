"""AdaSD: adaptive speculative decoding (arXiv 2512.11280)."""
