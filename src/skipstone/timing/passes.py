"""What passes over single layers, the head and drafts of several lengths cost on this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass
from skipstone.timing.machine import timings

REPEATS = 7
LENGTHS = (1, 2, 3, 4, 6, 8, 12)
"""Draft lengths that are considered."""


@dataclass(frozen=True)
class Costs:
    """Seconds at batch 1. layers: of each, for one token. head: norm and LM head. rows: draft length d -> a pass of d + 1
    tokens through all layers."""

    layers: list[float]
    head: float
    rows: dict[int, float]

    @property
    def plain(self) -> float:
        """One step of plain decoding."""
        return sum(self.layers) + self.head


@torch.inference_mode()
def measure_costs(layered: LayeredModel, length: int) -> Costs:
    """Time every layer for one token after `length` others, the head, and whole passes over drafts."""
    most = max(LENGTHS) + 1
    store = KVStore(1, layered.depth, length + most)
    store.reserve(length + most)
    everything = range(layered.depth)

    def run(width: int, layers: range) -> Callable[[], Any]:
        positions = torch.arange(length, length + width, device=layered.device)[None]
        hidden = layered.embed(positions % layered.embeddings, positions)
        at = Pass(positions, positions, None, slice(0, 1), length + width, length)
        return lambda: layered.run(hidden, at, store, layers)

    state = run(1, everything)()
    layers = [median(timings(run(1, range(layer, layer + 1)), layered.device, REPEATS)) for layer in everything]
    whole = median(timings(run(1, everything), layered.device, REPEATS))
    share = whole / sum(layers)  # one layer at a time finds its weights in the cache
    return Costs(
        [seconds * share for seconds in layers],
        median(timings(lambda: layered.logits(state), layered.device, REPEATS)),
        {length: median(timings(run(length + 1, everything), layered.device, REPEATS)) for length in LENGTHS},
    )
