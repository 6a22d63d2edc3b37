"""The lens through AdaDecode's exit heads: how probable the generated tokens are after every exit, by the model's own head and
by the trained ones (arXiv 2506.03700, Figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.models.layered import LayeredModel
from skipstone.tasks.exits import states


@dataclass(frozen=True)
class Reading:
    """Of k exits and the last layer over n tokens. probability: [k + 1][n], of the generated token. divergence: [k + 1], mean
    KL(p* || p) in nats; agreement: [k + 1], share of tokens at which an exit's best one is the last layer's."""

    probability: list[list[float]]
    divergence: list[float]
    agreement: list[float]


@dataclass(frozen=True)
class HeadLens:
    """layers: of every exit, and L. own: as the model's LM head reads them; trained: as the exit heads do."""

    layers: list[int]
    own: Reading
    trained: Reading

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


@torch.inference_mode()
def through(model: PreTrainedModel, heads: ExitHeads, pairs: Sequence[tuple[Tensor, Tensor]]) -> HeadLens:
    """Read generated texts at every exit. pairs: (prompt [T], new tokens [n]) int64, n at least 1."""
    layered = LayeredModel(model)
    parts: dict[bool, list[Tensor]] = {False: [], True: []}
    for prompt, new in pairs:
        span = slice(len(prompt) - 1, len(prompt) + len(new) - 1)
        seen = [state[:, span] for state in states(model, layered, torch.cat([prompt, new]))[1:]]
        final = layered.logits(seen[-1])[0].double().log_softmax(-1)
        for trained, found in parts.items():
            said = [
                heads.logits(layered, index, seen[layer - 1]) if trained else layered.logits(seen[layer - 1])
                for index, layer in enumerate(heads.card.layers)
            ]
            rows = [_figures(one[0].double().log_softmax(-1), final, new.to(final.device)) for one in said]
            found.append(torch.stack([*rows, _figures(final, final, new.to(final.device))], 1).cpu())
    own, trained = (_reading(torch.cat(found, 2)) for found in parts.values())
    return HeadLens([*heads.card.layers, layered.depth], own, trained)


def _figures(said: Tensor, final: Tensor, new: Tensor) -> Tensor:
    """[3, n]: probability of the generated token, divergence, agreement. said, final: [n, V] log probabilities."""
    probability = said.gather(-1, new[:, None])[:, 0].exp()
    divergence = (final.exp() * (final - said)).sum(-1)
    return torch.stack([probability, divergence, (said.argmax(-1) == final.argmax(-1)).double()])


def _reading(figures: Tensor) -> Reading:
    """figures: [3, k + 1, n]."""
    probability, divergence, agreement = figures
    return Reading(probability.tolist(), divergence.mean(-1).tolist(), agreement.mean(-1).tolist())
