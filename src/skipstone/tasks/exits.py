"""How well every exit predicts a task's own answers: perplexity, and agreement with the last layer (LayerSkip, Table 1)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

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
    nats, same, tokens = torch.zeros(layered.depth).double(), torch.zeros(layered.depth).double(), 0
    for prompt, answer in pairs:
        span = slice(len(prompt) - 1, len(prompt) + len(answer) - 1)
        wanted, best = answer.to(model.device), None
        for layer, state in reversed(list(enumerate(states(model, layered, torch.cat([prompt, answer]))[1:]))):
            logits = layered.logits(state[:, span])[0]
            best = logits.argmax(-1) if best is None else best
            nats[layer] += F.cross_entropy(logits.double(), wanted, reduction="sum").cpu()
            same[layer] += (logits.argmax(-1) == best).sum().cpu()
        tokens += len(answer)
        done()
    if not tokens:
        raise ValueError("there is no answer to measure")
    perplexity = [math.exp(value) if value < 700 else math.inf for value in (nats / tokens).tolist()]
    return ExitFigures(tokens, perplexity, (same / tokens).tolist())
