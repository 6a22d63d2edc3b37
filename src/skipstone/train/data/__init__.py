"""Documents of a training run, from their sources to rows of token ids."""
