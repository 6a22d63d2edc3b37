"""The engine that runs transformers' own modules, and its patches."""
