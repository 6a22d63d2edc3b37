"""What is timed and how: calls, passes, the machine, and the arithmetic of measurements."""
