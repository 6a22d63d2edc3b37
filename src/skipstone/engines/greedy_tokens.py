"""Tokens with the largest scores, and NO_TOKEN for rows without a valid score."""

import torch
from torch import Tensor

NO_TOKEN = -1
"""Takes the place of a token if a score is NaN or all scores are minus infinity."""


def greedy_token(scores: Tensor) -> Tensor:
    """argmax over the last dimension, the lowest id of equal ones; NO_TOKEN if no score is valid. [..., V] -> [...] int64."""
    best = scores.argmax(-1)  # the position of a NaN, if there is one
    return torch.where(scores.gather(-1, best[..., None])[..., 0] > float("-inf"), best, NO_TOKEN)


def without_invalid(tokens: Tensor, scores: Tensor) -> Tensor:
    """Tokens, replaced by NO_TOKEN where their score is NaN or minus infinity. Both have one shape."""
    return torch.where(scores > float("-inf"), tokens, NO_TOKEN)


def top_k_tokens(scores: Tensor, count: int) -> Tensor:
    """The ids of the `count` largest scores, the largest first; equal ones in any order. NO_TOKEN if a score is NaN or all are
    minus infinity. [..., V] -> [..., count] int64."""
    best = scores.topk(count, dim=-1)  # NaN comes first
    return without_invalid(best.indices, best.values[..., :1].expand_as(best.values))
