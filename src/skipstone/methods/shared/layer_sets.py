"""Which sublayers a draft model leaves out, what that costs and what it is worth.

A layer set z says for every attention and every MLP of the layers in between (the first and the last always run) whether it is
skipped. Costs are in plain steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skipstone.models.skipping import SkipSet

Z = NDArray[np.bool_]
"""[n], n = 2 (L - 2): the attentions of layers 1 to L - 2 (counted from 0), then their MLPs; True is skipped."""
MOST_DRAFTS = 25
UNKNOWN_SLOPE = 0.04
"""What a token more in a scoring pass is thought to cost before anything was timed."""


@dataclass(frozen=True)
class Space:
    """All layer sets of a model of `layers` layers. ValueError for fewer than 4: nothing sensible would be left."""

    layers: int

    def __post_init__(self) -> None:
        if self.layers < 4:
            raise ValueError(f"skipping sublayers needs a model of at least 4 layers, found {self.layers}")

    @property
    def size(self) -> int:
        """Sublayers that may be skipped, n."""
        return 2 * (self.layers - 2)

    def count(self, ratio: float) -> int:
        """|z| for a skip ratio (of the sublayers that may be skipped, as in SWIFT's code)."""
        return round(ratio * self.size)

    def uniform(self, count: int) -> Z:
        """As many attentions as MLPs (one more, where `count` is odd), each spread evenly over the depth."""
        middle = self.layers - 2
        z = np.zeros(self.size, dtype=bool)
        for first, number in ((0, count - count // 2), (middle, count // 2)):
            for place in range(number):
                z[first + (2 * place + 1) * middle // (2 * number)] = True
        return z

    def random(self, count: int, rng: np.random.Generator) -> Z:
        """Any set of `count` sublayers, all equally likely."""
        z = np.zeros(self.size, dtype=bool)
        z[rng.permutation(self.size)[:count]] = True
        return z

    def to_skip_set(self, z: Z) -> SkipSet:
        """What the model understands."""
        middle = self.layers - 2
        attention, mlp = np.flatnonzero(z[:middle]) + 1, np.flatnonzero(z[middle:]) + 1
        return SkipSet(frozenset(attention.tolist()), frozenset(mlp.tolist()))

    def from_skip_set(self, skip: SkipSet) -> Z:
        """The way back. ValueError for layers that do not exist or may not be skipped."""
        z, middle = np.zeros(self.size, dtype=bool), self.layers - 2
        for kind, first, chosen in (("attention", 0, skip.attention), ("MLP", middle, skip.mlp)):
            if wrong := sorted(layer for layer in chosen if not 1 <= layer <= middle):
                raise ValueError(
                    f"the {kind} of layers 1 to {middle} may be skipped in a model of {self.layers} layers, counted from 0 "
                    f"(the first and the last always run), found {wrong}"
                )
            z[[first + layer - 1 for layer in chosen]] = True
        if z.all():
            raise ValueError("the layer set skips everything between the first and the last layer")
        if not z.any():
            raise ValueError("the layer set skips nothing: drafting with it would be decoding")
        return z


@dataclass(frozen=True)
class Costs:
    """Measured costs in plain steps. attention, mlp: of one such sublayer. scoring: v, of a pass over 1, 2, ... tokens.
    layer: what leaving out both of a layer saves besides."""

    attention: float
    mlp: float
    scoring: Sequence[float]
    layer: float = 0.0

    def draft(self, z: Z) -> float:
        """c(z), one draft pass."""
        middle = len(z) // 2
        return float(self.drafts(z[:middle].sum(), z[middle:].sum(), (z[:middle] & z[middle:]).sum()))

    def drafts(self, attentions: Any, mlps: Any, both: Any) -> Any:
        """c by how many attentions and MLPs are left out, and of how many layers both: numbers, or arrays [a] of them."""
        return np.maximum(1 - self.attention * attentions - self.mlp * mlps - self.layer * both, 1e-3)

    def score(self, tokens: int) -> float:
        """v, one pass over so many tokens; beyond the last known value on the line from the first to it."""
        known = len(self.scoring)
        if tokens <= known:
            return self.scoring[tokens - 1]
        slope = (self.scoring[-1] - self.scoring[0]) / (known - 1) if known > 1 else UNKNOWN_SLOPE
        return self.scoring[-1] + slope * (tokens - known)

    @cached_property
    def steps(self) -> NDArray[np.float64]:
        """v of steps of 1 to MOST_DRAFTS drafts."""
        return np.array([self.score(drafts + 1) for drafts in range(1, MOST_DRAFTS + 1)])


FLAT = Costs(0.0, 0.0, (1.0,))
"""Before anything was measured."""


def expected_speedup(matchness: Any, draft: Any, costs: Costs, most: int = MOST_DRAFTS) -> Any:
    """max over k > 0 of [(1 - m^(k+1)) / (1 - m)] / (k c + v(k+1)): tokens of a step of k drafts, each right with probability
    m, over its cost in plain steps; under 1 where no draft length pays. matchness, draft: numbers, or arrays [a] of them.
    most: drafts, at most MOST_DRAFTS."""
    m, c = np.clip(np.asarray(matchness, dtype=float), 0, 1 - 1e-9), np.asarray(draft, dtype=float)
    k = np.arange(1, min(most, MOST_DRAFTS) + 1)
    tokens = (1 - m[..., None] ** (k + 1)) / (1 - m[..., None])
    return (tokens / (k * c[..., None] + costs.steps[: len(k)])).max(-1)


def measured_speedup(mean_length: float, alpha: float, draft: float, score: float) -> float:
    """E = M / ((M - 1) c / alpha + v): SWIFT's Eq. 6 with the cost of the scoring pass measured too (v = 1 is the paper's)."""
    return mean_length / ((mean_length - 1) * draft / max(alpha, 1e-9) + score)


@dataclass(frozen=True)
class Objective:
    """What a search maximises: (matchness, z) -> worth. by: "speed" or the paper's "matchness". most: drafts a step."""

    costs: Costs = FLAT
    by: str = "speed"
    most: int = MOST_DRAFTS

    def __call__(self, matchness: float, z: Z) -> float:
        return matchness if self.by == "matchness" else self.speedup(matchness, z)

    def speedup(self, matchness: float, z: Z) -> float:
        """What a set of that matchness is expected to bring."""
        return float(expected_speedup(matchness, self.costs.draft(z), self.costs, self.most))

    def of_many(self, matchness: NDArray[np.float64], drafts: NDArray[np.float64]) -> NDArray[np.float64]:
        """The same for many sets. matchness: [a]. drafts: [a], what a draft costs with each."""
        return matchness if self.by == "matchness" else expected_speedup(matchness, drafts, self.costs, self.most)
