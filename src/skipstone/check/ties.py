"""Where two greedy texts part: a tie that rounding broke, or a bug.

One row and several rows are multiplied in different orders, so their scores differ by rounding; where the two best tokens are
closer than that, either choice is the model's own. Anything farther apart is a bug, whoever made it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone import api

NEAR = 8
"""How many of the best tokens the rounding is measured on."""


@dataclass(frozen=True)
class Divergence:
    """The first token in which two texts of one prompt differ.

    position: its index among the new tokens. expected, found: token ids, None where that text had ended. margin: by how much
    the precise scores prefer the better of the two. gap: how far the worse of them is from the best token of all. allowed: the
    largest gap that rounding in the model's own dtype explains. All in units of the scores.
    """

    prompt: int
    position: int
    expected: int | None
    found: int | None
    margin: float | None = None
    gap: float | None = None
    allowed: float | None = None

    @property
    def tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.allowed is not None and self.gap <= self.allowed


class Judge:
    """Tells ties from bugs on one model. A copy of it in the next wider dtype is made when it is first needed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @cached_property
    def precise(self) -> PreTrainedModel:
        """The model in float32, or in float64 where it is in float32 already."""
        wide = torch.float64 if self.model.dtype in (torch.float32, torch.float64) else torch.float32
        wider: Any = copy.deepcopy(self.model)
        return wider.to(wide)

    def compare(
        self, prompt: int, ids: Tensor, expected: Sequence[int], found: Sequence[int], options: Mapping[str, Any]
    ) -> Divergence | None:
        """None for equal texts. ids: [T] int64, the prompt; options: of `model.generate`, those that change scores."""
        if list(expected) == list(found):
            return None
        pairs = zip(expected, found, strict=False)
        position = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(expected), len(found)))
        one, other = (text[position] if position < len(text) else None for text in (expected, found))
        if one is None or other is None:
            return Divergence(prompt, position, one, other)
        before = torch.cat([ids, torch.tensor(list(expected[:position]), dtype=ids.dtype)])[None]
        scores, precise = (scored(model, before, options) for model in (self.model, self.precise))
        best = precise.topk(min(NEAR, len(precise))).indices
        near = torch.cat([best, torch.tensor([one, other])])
        rounding = (scores[near] - precise[near]).abs()
        rounding = float(rounding[rounding.isfinite()].max()) if rounding.isfinite().any() else 0.0
        unit = torch.finfo(self.model.dtype).eps * float(precise[best[0]].abs())
        worse = float(torch.minimum(precise[one], precise[other]))
        margin = float((precise[one] - precise[other]).abs())
        return Divergence(prompt, position, one, other, margin, float(precise[best[0]]) - worse, 4 * rounding + 2 * unit)


def scored(model: PreTrainedModel, ids: Tensor, options: Mapping[str, Any]) -> Tensor:
    """[V] float64 on the CPU: the scores of the token after ids [1, T], processors applied, as plain decoding has them."""
    wanted = {**options, "max_new_tokens": 1, "do_sample": False, "output_scores": True}
    output = api.generate(model, ids.to(model.device), "autoregressive", **wanted)
    scores: Any = output.scores
    return scores[0][0].double().cpu()
