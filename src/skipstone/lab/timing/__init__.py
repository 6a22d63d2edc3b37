"""Timing of calls and passes, the machine, measured costs, and the statistics of measurements."""
