"""Models with random weights and a wanted agreement, and their benchmark."""
