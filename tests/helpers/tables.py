"""Targets given as tables, and random drafts for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding import verify
from skipstone.decoding.draft import Draft

Table = Callable[[Sequence[int]], list[float]]
"""Tokens of a path -> the distribution of the next one."""


def double(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.double)


def contextual(rows: list[list[float]]) -> Table:
    """p that depends on the whole path, order included."""
    return lambda path: rows[sum((place + 1) * (token + 1) for place, token in enumerate(path)) % len(rows)]


def as_probability(table: Table) -> verify.Probability:
    def p(node: Tensor, path: Tensor, *_: Any) -> Tensor:
        return double([table(row) for row in path.tolist()])

    return p


def random_draft(dice: random.Random, rows: int, width: int, vocab: int, chain: bool = False) -> Draft:
    """A ragged draft: trees with invalid nodes in between and nodes that may not be accepted, or chains of any length."""
    tokens = torch.tensor([[dice.randrange(vocab) for _ in range(width)] for _ in range(rows)], dtype=torch.long)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    parents = torch.full_like(tokens, -1)
    candidate = torch.tensor([[dice.random() < 0.8 for _ in range(width)] for _ in range(rows)], dtype=torch.bool)
    for row in range(rows):
        if chain:
            valid[row, : dice.randint(0, width)] = True
            continue
        for node in range(width):
            above = dice.choice([-1, *[n for n in range(node) if valid[row, n]]])
            sisters = [n for n in range(node) if valid[row, n] and parents[row, n] == above]
            parents[row, node] = above
            valid[row, node] = dice.random() < 0.8 and int(tokens[row, node]) not in tokens[row, sisters].tolist()
    draft = Draft(tokens, valid, None, parents=None if chain else parents, candidate=candidate)
    draft.check()
    return draft
