"""A model's answers in runs of `skipstone train heads`, as documents for a training recipe.

A draft model learns best from its target's own texts. In a recipe, with folders relative to this file:

    kind: script
    path: answers.py
    arguments: {runs: [../../runs/smollm2/heads-maths], tokenizer: ../../runs/smollm2/rotated}

A document is a pair of a prompt, which is not predicted, and its answer.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
ANSWERS = "answers.jsonl"  # in the folder of a run: a line of settings, then a line per answer


def documents(runs: Sequence[str], tokenizer: str) -> Iterator[tuple[str, str]]:
    """(prompt, answer) as texts with special tokens, in the order of runs. FileNotFoundError for a run without answers."""
    reader = AutoTokenizer.from_pretrained(HERE / tokenizer)
    for run in runs:
        _, *lines = (HERE / run / ANSWERS).read_text(encoding="utf-8").splitlines()
        for line in lines:
            one = json.loads(line)
            yield reader.decode(one["prompt"]), reader.decode(one["tokens"])
