"""How well every exit predicts a task's own answers: perplexity, and agreement with the last layer (LayerSkip, Table 1)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.models.exits import ExitTally
from skipstone.models.layered import LayeredModel
from skipstone.models.watching import watched


@dataclass(frozen=True)
class ExitFigures:
    """Lists of layers, layers[:1] first, L last. tokens: predicted ones. perplexity: of a token, teacher-forced. agreement:
    share of tokens at which an exit's best one is the last layer's."""

    tokens: int
    perplexity: list[float]
    agreement: list[float]

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@torch.inference_mode()
def states(model: PreTrainedModel, layered: LayeredModel, ids: Tensor) -> list[Tensor]:
    """[T] int64 -> what enters layer 0 and what leaves every layer, L + 1 tensors [1, T, d], by the model's own forward."""
    exits = range(layered.depth + 1)
    with watched(layered, exits) as found:
        model(ids[None].to(model.device), use_cache=False)
    return [found[exit] for exit in exits]


@torch.inference_mode()
def answered(
    model: PreTrainedModel, pairs: Iterable[tuple[Tensor, Tensor]], done: Callable[[], None] = lambda: None
) -> ExitFigures:
    """Perplexity of answers after their prompts at every exit. pairs: ([T], [A]) int64, T and A at least 1. done: called after
    each. Accumulated in float64. ValueError where there is no answer at all."""
    layered = LayeredModel(model)
    tally = ExitTally(layered, range(1, layered.depth + 1))
    for prompt, answer in pairs:
        span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        found = states(model, layered, torch.cat([prompt, answer]))
        tally.add({exit: found[exit][0, span] for exit in tally.exits}, answer.to(model.device))
        done()
    if not tally.tokens:
        raise ValueError("there is no answer to measure")
    return ExitFigures(tally.tokens, [*tally.perplexity().values()], [*tally.agreement().values()])
