"""The engine that runs transformers' own modules, and what it puts on them."""
