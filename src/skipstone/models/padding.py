"""Prompts of several lengths as one batch."""

from collections.abc import Sequence

import torch
from torch import Tensor


def left_padded(rows: Sequence[Sequence[int]], fill: int = 0) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask), both [B, T] int64: rows of ids that end together, with `fill` and mask 0 before them."""
    width = max(map(len, rows))
    ids = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return ids, mask
