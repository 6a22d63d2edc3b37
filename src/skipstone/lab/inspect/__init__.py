"""What every layer already knows of a text."""
