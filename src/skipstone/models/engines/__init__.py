"""What computes the layers of a model: transformers' own modules (`eager`), or code of our own (`native`)."""
