"""How long a piece of work takes; what passes over layers, the head and drafts of several lengths cost on this machine."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass, SkipSet

REPEATS = 7  # how often a pass is timed; the median counts
LENGTHS = (1, 2, 3, 4, 6, 8, 12)  # draft lengths whose scoring passes are timed


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timings(work: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> list[float]:
    """Seconds of each of some runs, after one that is left out."""
    times = []
    for _ in range(repeats + 1):
        synchronise(device)
        began = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - began)
    return times[1:]


def store_for(layered: LayeredModel, tokens: int) -> KVStore:
    """An empty store of one row for so many tokens."""
    store = KVStore(1, layered.depth, tokens)
    store.reserve(tokens)
    return store


def one_row(begin: int, width: int, device: torch.device) -> Pass:
    """A pass of one row over `width` tokens behind `begin` others."""
    places = torch.arange(begin, begin + width, device=device)[None]  # [1, width]
    return Pass(places, places, None, slice(0, 1), begin + width, begin)


def run_tokens(layered: LayeredModel, store: KVStore, ids: Tensor, begin: int, skip: SkipSet | None = None) -> Tensor:
    """Run ids [1, n] through all layers behind `begin` tokens of a store of one row, into which their keys and values are
    written. Returns [1, n, d]. skip: sublayers to leave out."""
    at = one_row(begin, ids.shape[1], layered.device)
    return layered.run(layered.embed(ids, at.positions), at, store, range(layered.depth), skip)


class TimedPasses:
    """Passes behind `length` other tokens, each timed by itself; which tokens they are makes no difference."""

    def __init__(self, layered: LayeredModel, length: int) -> None:
        """ValueError for a model whose positions are too few for the longest draft."""
        self.layered, widest = layered, max(LENGTHS) + 1
        self.length = min(length, layered.max_positions - widest)
        if self.length < 0:
            raise ValueError(
                f"the model has {layered.max_positions} positions, too few to time drafts of {max(LENGTHS)} tokens"
            )
        self.store = store_for(layered, self.length + widest)

    def seconds(self, width: int = 1, layers: range | None = None, skip: SkipSet | None = None) -> float:
        """The median of what a pass over `width` tokens takes, through some layers or all, without the head."""
        layered, (at, hidden) = self.layered, self._tokens(width)
        taken = range(layered.depth) if layers is None else layers
        return median(timings(lambda: layered.run(hidden, at, self.store, taken, skip), layered.device))

    def head_seconds(self) -> float:
        """The median of what norm and LM head take for one token."""
        layered, (at, hidden) = self.layered, self._tokens(1)
        state = layered.run(hidden, at, self.store, range(layered.depth))  # [1, 1, d]
        return median(timings(lambda: layered.logits(state), layered.device))

    def _tokens(self, width: int) -> tuple[Pass, Tensor]:
        """A pass over `width` different tokens, and their embeddings [1, width, d]."""
        at = one_row(self.length, width, self.layered.device)
        return at, self.layered.embed(at.positions % self.layered.embeddings, at.positions)


@dataclass(frozen=True)
class PassTimes:
    """Seconds of passes at batch 1."""

    layers: list[float]  # of each layer, for one token
    head: float  # norm and LM head
    rows: dict[int, float]  # draft length d -> a pass of d + 1 tokens through all layers

    @property
    def plain(self) -> float:
        """One step of plain decoding."""
        return sum(self.layers) + self.head


@torch.inference_mode()
def measure_passes(timed: TimedPasses) -> PassTimes:
    """Time every layer for one token, the head, and whole passes over drafts."""
    layers = [timed.seconds(layers=range(layer, layer + 1)) for layer in range(timed.layered.depth)]
    share = timed.seconds() / sum(layers)  # one layer at a time finds its weights in the cache
    rows = {length: timed.seconds(length + 1) for length in LENGTHS}
    return PassTimes([seconds * share for seconds in layers], timed.head_seconds(), rows)
