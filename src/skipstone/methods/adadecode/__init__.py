"""AdaDecode: adaptive layer parallelism (arXiv 2506.03700)."""
