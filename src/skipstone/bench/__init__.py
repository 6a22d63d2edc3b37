"""Measuring: skipstone's methods and what people use today, in one interleaved run.

`python -m skipstone.bench MODEL` prints a table and, as its last line, one JSON document. The parts: prompts (what is
continued), measure (one timed call, and the order of all of them), peers (transformers' own decoding), tuning (settings, on
other prompts than those reported), statistics (pure functions), machine (ceiling and provenance), surrogate (synthetic models
of a wanted agreement), report (figures and tables), run (a whole benchmark).
"""
