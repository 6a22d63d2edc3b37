"""The machine: it knows models, positions, distributions and the loop, and no decoding method."""
