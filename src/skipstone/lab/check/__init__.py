"""Whether a method writes what the model alone would write."""
