"""What runs a model's layers: engines besides transformers' own modules."""
