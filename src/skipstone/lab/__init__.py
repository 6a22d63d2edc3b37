"""Measuring and checking: benchmarks, tasks, timing, the exactness check, `inspect`, layer-set search, synthetic models."""
