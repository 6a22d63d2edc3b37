"""Measuring: methods and what people use today in one interleaved run; whether a method is lossless; what layers know.

`skipstone bench`, `check` and `inspect` are made of this. What is run: plan, lineup, task, tasks, protocols, dialogue. How it
is measured: run, asking, measure, memory, peers, tuning, journal, machine, surrogate. What it is worth: scores, sandbox. What
comes out: statistics, figures, tables, charts, report, compare. Proofs: check, findings, ties, laws. The lens: lens,
lens_pictures.
"""
