"""The engine that runs code of our own instead of transformers' modules."""
