"""How good every exit of a model is on held-out text: perplexity, and agreement with the last layer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from skipstone.train.layerskip.loss import CHUNK, IGNORED, shifted
from skipstone.train.layerskip.objective import Stack


@dataclass(frozen=True)
class ExitQuality:
    """Per exit layer E (layers[:E]): perplexity per token, and the share of positions whose argmax is the last layer's,
    teacher-forced. tokens: positions measured."""

    perplexity: dict[int, float]
    agreement: dict[int, float]
    tokens: int

    def flat(self) -> dict[str, float]:
        """One number per name, for logs. loss: nats a token of the last layer."""
        last = max(self.perplexity)
        values = {"loss": math.log(self.perplexity[last]), "perplexity": self.perplexity[last]}
        for layer in sorted(self.perplexity):
            values[f"perplexity_exit_{layer}"] = self.perplexity[layer]
            values[f"agreement_exit_{layer}"] = self.agreement[layer]
        return values


@torch.no_grad()
def exit_quality(
    model: PreTrainedModel, rows: Any, batch_size: int = 8, exits: Sequence[int] | None = None, chunk: int = CHUNK
) -> ExitQuality:
    """Measure exits on a data set of items {input_ids [T], labels [T]}, all of one length, with attention_mask [T] where rows
    are padded. exits: layers E in 1..L, None for all; L is always among them. chunk: positions whose logits exist at once.

    Accumulated in float64. The model is left in the mode it was in. ValueError for exits that do not exist, and for rows that
    predict nothing.
    """
    stack, training = Stack(model), model.training
    depth = len(stack.layers)
    chosen = sorted({*(range(1, depth + 1) if exits is None else exits), depth})
    if wrong := [layer for layer in chosen if not 1 <= layer <= depth]:
        raise ValueError(f"exits must lie between 1 and {depth}, found {wrong}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, found {chunk}")
    loss, same, count = torch.zeros(depth + 1).double(), torch.zeros(depth + 1).double(), 0
    wanted = {layer - 1 for layer in chosen}
    model.eval()
    try:
        for batch in DataLoader(rows, batch_size=batch_size):
            ids, targets = batch["input_ids"].to(model.device), shifted(batch["labels"]).flatten().to(model.device)
            mask = batch["attention_mask"].to(model.device) if "attention_mask" in batch else None
            with stack.recorded(wanted.__contains__, lambda _: None) as states:
                stack.decoder(input_ids=ids, attention_mask=mask, use_cache=False)
            flat = {layer: state.flatten(0, 1) for layer, state in states.items()}
            for start in range(0, len(targets), chunk):
                part = slice(start, start + chunk)
                losses, agreed = _chunk(stack, {layer: state[part] for layer, state in flat.items()}, targets[part], depth)
                loss, same = loss + losses, same + agreed
            count += int((targets != IGNORED).sum())
    finally:
        model.train(training)
    if not count:
        raise ValueError("there is nothing to measure: no position of the rows predicts anything")
    perplexity, agreement = (loss / count).exp().tolist(), (same / count).tolist()  # exp: inf where math.exp would raise
    return ExitQuality({layer: perplexity[layer] for layer in chosen}, {layer: agreement[layer] for layer in chosen}, count)


def _chunk(stack: Stack, states: dict[int, Tensor], targets: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """(summed cross-entropy, positions that agree) [L+1] float64 of the exits of some positions; index E."""
    loss, same = torch.zeros(depth + 1).double(), torch.zeros(depth + 1).double()
    counted = targets != IGNORED
    best = None
    for layer in sorted(states, reverse=True):
        logits = stack.logits(states[layer]).float()
        best = logits.argmax(-1) if best is None else best
        loss[layer + 1] = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum").double()
        same[layer + 1] = ((logits.argmax(-1) == best) & counted).sum()
    return loss, same
