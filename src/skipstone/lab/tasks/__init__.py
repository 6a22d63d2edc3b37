"""Data sets that methods are measured on: prompts, papers' protocols, scores, the sandbox."""
