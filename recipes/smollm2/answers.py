"""The answers that a model gave in runs of `skipstone train heads`, as documents for a training recipe: what a draft model of the
same tokens learns from is what the model itself says.

In a recipe: `{kind: script, path: answers.py, arguments: {runs: [../../runs/smollm2/heads-maths], tokenizer: ../../runs/smollm2/model}}`.
Folders are relative to this file. A document is a pair of a prompt, which is only read, and its answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from transformers import AutoTokenizer

HERE = Path(__file__).resolve().parent
ANSWERS = "answers.jsonl"  # file in the folder of a run: a line that says what was asked, then a line for every answer


def documents(runs: Sequence[str], tokenizer: str) -> Iterator[tuple[str, str]]:
    """(prompt, answer) as texts, special tokens in words, in the runs' order. FileNotFoundError for a run without answers."""
    reader = AutoTokenizer.from_pretrained(HERE / tokenizer)
    for run in runs:
        _, *lines = (HERE / run / ANSWERS).read_text(encoding="utf-8").splitlines()
        for line in lines:
            one = json.loads(line)
            yield reader.decode(one["prompt"]), reader.decode(one["tokens"])
