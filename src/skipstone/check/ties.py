"""Where two greedy texts part: a tie that rounding broke, or a bug.

One row and several rows are multiplied in different orders, so their scores differ by rounding; where the two best tokens are
closer than that, either choice is the model's own. Anything farther apart is a bug, whoever made it.

    parted = Judge(model).compare(prompt, expected, found)
    assert parted is None or parted.tie, parted.message()
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone import api

NEAR = 8  # best tokens on which the rounding is measured
CONTEXT = 8  # tokens before and after the difference that a message shows
Decode = Callable[[list[int]], str]


@dataclass(frozen=True)
class Divergence:
    """The first token in which two texts of one prompt differ. Gaps are in units of the scores (logits)."""

    prompt: int  # which of several prompts, as the caller numbers them
    position: int  # the token's index among the new ones
    expected: int | None  # token id, None where that text had ended
    found: int | None
    margin: float | None = None  # by how much the precise scores prefer the better of the two
    gap: float | None = None  # how far the worse of them is from the best token of all
    allowed: float | None = None  # the largest gap that rounding in the model's own dtype explains
    texts: tuple[list[int], list[int]] = field(default=([], []), repr=False)  # expected and found, whole

    @property
    def tie(self) -> bool:
        """Whether rounding explains it."""
        return self.gap is not None and self.allowed is not None and self.gap <= self.allowed

    def __str__(self) -> str:
        """Where, what, and by how much, in one line."""
        expected, found = ("the end" if one is None else f"token {one}" for one in (self.expected, self.found))
        told = f"prompt {self.prompt}, new token {self.position}: expected {expected}, found {found}"
        if self.gap is None:
            return told
        return f"{told}, {self.gap:.3g} below the best score where rounding explains {self.allowed:.2g}"

    def message(self, decode: Decode = str) -> str:
        """Tie or bug, where, by how much, and both texts around it, in four lines. decode: token ids -> what to show of them,
        for example a tokenizer's `decode`."""
        margin = "" if self.margin is None else f" (the two are {self.margin:.3g} apart)"
        lines = [f"{'a tie, which rounding explains' if self.tie else 'A BUG'}{margin}", str(self)]
        first = max(0, self.position - CONTEXT)
        for name, text in zip(("expected", "found"), self.texts, strict=True):
            before, after = text[first : self.position], text[self.position : self.position + CONTEXT]
            lines.append(f"{name:>8}: {'... ' if first else ''}{decode(before)} >>> {decode(after) if after else 'the end'}")
        return "\n".join(lines)


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
        self,
        prompt: Tensor,
        expected: Sequence[int],
        found: Sequence[int],
        options: Mapping[str, Any] | None = None,
        number: int = 0,
    ) -> Divergence | None:
        """Where two greedy texts part, and whether rounding explains it; None for equal texts.

        prompt: [T] int64. expected, found: new token ids. options: of `model.generate`, those that change scores.
        number: which of several prompts it is, for messages.
        """
        expected, found = list(expected), list(found)
        if expected == found:
            return None
        shared = min(len(expected), len(found))
        position = next((place for place in range(shared) if expected[place] != found[place]), shared)
        one, other = (text[position] if position < len(text) else None for text in (expected, found))
        texts = (expected, found)
        if one is None or other is None:
            return Divergence(number, position, one, other, texts=texts)
        before = torch.cat([prompt.cpu(), torch.tensor(expected[:position], dtype=prompt.dtype)])[None]  # [1, T + position]
        scores, precise = (_next_scores(model, before, options or {}) for model in (self.model, self.precise))  # [V] each
        best = precise.topk(min(NEAR, len(precise))).indices
        near = torch.cat([best, torch.tensor([one, other])])
        rounding = (scores[near] - precise[near]).abs()
        rounding = float(rounding[rounding.isfinite()].max()) if rounding.isfinite().any() else 0.0
        unit = torch.finfo(self.model.dtype).eps * float(precise[best[0]].abs())
        margin = float((precise[one] - precise[other]).abs())
        gap = float(precise[best[0]] - torch.minimum(precise[one], precise[other]))
        return Divergence(number, position, one, other, margin, gap, 4 * rounding + 2 * unit, texts)


def _next_scores(model: PreTrainedModel, ids: Tensor, options: Mapping[str, Any]) -> Tensor:
    """[V] float64 on the CPU: the scores of the token after ids [1, T], processors applied, as plain decoding has them."""
    wanted = {**options, "max_new_tokens": 1, "do_sample": False, "output_scores": True}
    output = api.generate(model, ids.to(model.device), "autoregressive", **wanted)
    scores: Any = output.scores
    return scores[0][0].double().cpu()
