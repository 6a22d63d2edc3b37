"""How good every exit of a model is on held-out text: perplexity, and agreement with the last layer."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from skipstone.models.exits import ExitTally
from skipstone.models.modules import DecoderModules
from skipstone.models.watching import watched
from skipstone.train.data.rows import IGNORED, shifted
from skipstone.train.layerskip.objective import CHUNK


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
    model: PreTrainedModel,
    rows: Any,
    batch_size: int = 8,
    exits: Sequence[int] | None = None,
    chunk: int = CHUNK,
    collate: Callable[[list[Any]], dict[str, Tensor]] | None = None,
) -> ExitQuality:
    """Measure exits on a data set of items {input_ids [T], labels [T]}, all of one length, with attention_mask [T] where rows
    are padded. exits: layers E in 1..L, None for all; L is always among them. chunk: positions whose logits exist at once.
    collate: makes a batch of items, by default torch's way.

    Accumulated in float64. The model is left in the mode it was in. ValueError for exits that do not exist, and for rows that
    predict nothing.
    """
    modules, training = DecoderModules(model), model.training
    tally = ExitTally(modules, range(1, modules.depth + 1) if exits is None else exits)
    if wrong := [layer for layer in tally.exits if not 1 <= layer <= modules.depth]:
        raise ValueError(f"exits must lie between 1 and {modules.depth}, found {wrong}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 position, found {chunk}")
    model.eval()
    try:
        for batch in DataLoader(rows, batch_size=batch_size, collate_fn=collate):
            ids, targets = batch["input_ids"].to(model.device), shifted(batch["labels"]).flatten().to(model.device)
            mask = batch["attention_mask"].to(model.device) if "attention_mask" in batch else None
            with watched(modules, tally.exits) as found:
                modules.decoder(input_ids=ids, attention_mask=mask, use_cache=False)
            predicting = targets != IGNORED
            states = {layer: state.flatten(0, 1)[predicting] for layer, state in found.items()}  # [N, d] each
            targets = targets[predicting]
            for first in range(0, len(targets), chunk):
                part = slice(first, first + chunk)
                tally.add({layer: state[part] for layer, state in states.items()}, targets[part])
    finally:
        model.train(training)
    if not tally.tokens:
        raise ValueError("there is nothing to measure: no position of the rows predicts anything")
    return ExitQuality(tally.perplexity(), tally.agreement(), tally.tokens)
