"""What decoding costs on one machine, and the speed that follows from it: a table that `skipstone.lab.timing.measure_costs`
measures.

A step with k drafts takes k c_d + V(k + 1) + o seconds and brings M tokens: c_d is what a draft step costs, V(n) what scoring n
tokens of every row costs, and o is what the rest of the step costs. All figures are seconds of the whole batch.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self


@dataclass(frozen=True)
class CostCurve:
    """A non-decreasing cost, measured at some places and interpolated linearly. Beyond the last place the last line goes on.
    ValueError unless places rise, and values are finite, at least 0 and never fall."""

    places: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.places or len(self.places) != len(self.values):
            raise ValueError(f"a curve has a value for every place and at least one, found {self.places} and {self.values}")
        if any(b <= a for a, b in zip(self.places, self.places[1:], strict=False)):
            raise ValueError(f"the places of a curve rise, found {self.places}")
        if not all(math.isfinite(value) and value >= 0 for value in self.values):
            raise ValueError(f"the values of a curve are finite and at least 0, found {self.values}")
        if any(b < a for a, b in zip(self.values, self.values[1:], strict=False)):
            raise ValueError(f"the values of a curve never fall, found {self.values}")

    @classmethod
    def fitted(cls, values: dict[int, float]) -> Self:
        """The curve nearest to values by place, by least squares (pool adjacent violators): where measured values fall, their
        mean stands for all of them."""
        places, blocks = sorted(values), []  # (sum, how many)
        for place in places:
            blocks.append((values[place], 1))
            while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] > blocks[-1][0] * blocks[-2][1]:
                (a, m), (b, n) = blocks[-2:]
                blocks[-2:] = [(a + b, m + n)]
        level = [total / count for total, count in blocks for _ in range(count)]
        return cls(tuple(places), tuple(max(level[: index + 1]) for index in range(len(level))))  # a mean may round down

    def __call__(self, place: float) -> float:
        places, values = self.places, self.values
        if place <= places[0] or len(places) == 1:
            return values[0]
        right = min(bisect_right(places, place), len(places) - 1)
        left = right - 1
        share = (place - places[left]) / (places[right] - places[left])
        value = values[left] + share * (values[right] - values[left])
        return value if share > 1 else min(value, values[right])


@dataclass(frozen=True)
class DraftCost:
    """The cost of a draft step. step: its seconds. exit_layer: layers that drafting has already run for the scoring pass.
    looked_up: no model runs to draft."""

    step: float
    exit_layer: int = 0
    looked_up: bool = False


LOOKED_UP = DraftCost(0.0, looked_up=True)


@dataclass(frozen=True)
class MeanStep:
    """The steps of a run, on average and per row of the batch.

    tokens: M, committed by a step. drafts: draft steps of a step that drafted. rows: tokens that it scored, the last committed
    one among them. drafting: share of the steps that drafted; the others were plain.
    """

    tokens: float
    drafts: float
    rows: float
    drafting: float = 1.0


@dataclass(frozen=True)
class BatchCosts:
    """Seconds of the parts of one step of a batch. ValueError for what cannot be seconds.

    batch: rows. context: committed tokens of every row behind which all was measured. plain: a step of plain decoding from end
    to end. fixed: cost of a step without drafting and scoring. chain: cost of a chain of drafts without its draft steps.
    scoring: n -> n tokens of every row scored, from a draft on the host to the verdict on the host, V(n). layers: n -> the part
    of it that the layers take. exits: E -> a draft step of the first E layers and the head; its last place is the depth L.
    attention, mlp: what leaving out one such sublayer saves in a draft step; layer: what leaving out both of a layer saves
    besides. ranked: what a draft step costs more whose runners-up are noted (SWIFT's trees). context_slope: n -> what one more
    token of context adds to V(n). draft_models: fingerprint -> a draft step of that model. spread: how far the median of an
    entry's times lies above their minimum, as a share of it; the median of all entries. busy: the machine had other work to do
    meanwhile, and all figures are too long, by about the same factor.
    """

    batch: int
    context: int
    plain: float
    fixed: float
    chain: float
    scoring: CostCurve
    layers: CostCurve
    exits: CostCurve
    attention: float
    mlp: float
    layer: float
    ranked: float
    context_slope: CostCurve
    spread: float = 0.0
    busy: bool = False
    draft_models: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.batch < 1 or self.context < 0:
            raise ValueError(f"costs are of a batch of at least 1 and a context, found {self.batch} and {self.context}")
        single = [self.fixed, self.chain, self.attention, self.mlp, self.layer, self.ranked, self.spread]
        if not all(math.isfinite(value) and value >= 0 for value in [*single, *self.draft_models.values()]):
            raise ValueError("costs are finite and at least 0")
        if not (math.isfinite(self.plain) and self.plain > 0 and self.scoring.values[0] > 0):
            raise ValueError(f"a plain step takes time, found {self.plain} seconds")

    @property
    def depth(self) -> int:
        return self.exits.places[-1]

    # ------------------------------------------------------------------------------------------- parts of a step

    def score(self, tokens: float, exit_layer: int = 0, context: float | None = None) -> float:
        """V(n). exit_layer: the drafts have so many layers behind them, where only the last of them still has to go."""
        saved = self.layers(tokens) - self.layers(1)
        whole = self.scoring(tokens) - exit_layer / self.depth * saved
        return whole + self._beyond(context) * self.context_slope(tokens)

    def plain_step(self, context: float | None = None) -> float:
        """A step of plain decoding."""
        return self.plain + self._beyond(context) * self.context_slope(1)

    def _beyond(self, context: float | None) -> float:
        return 0.0 if context is None else context - self.context

    def exit(self, exit_layer: int) -> DraftCost:
        """The first E layers and the head draft."""
        return DraftCost(self.exits(exit_layer), exit_layer)

    def skipping(self, attentions: int, mlps: int, both: int, ranked: bool = False) -> DraftCost:
        """The model drafts without so many attentions and MLPs, both of `both` layers. ranked: runners-up are noted."""
        saved = self.attention * attentions + self.mlp * mlps + self.layer * both
        return DraftCost(max(self.exits(self.depth) - saved, self.exits.values[0]) + self.ranked * ranked)

    def draft_model(self, fingerprint: str) -> DraftCost | None:
        """A draft model drafts; None where it was not measured."""
        step = self.draft_models.get(fingerprint)
        return None if step is None else DraftCost(step)

    # ----------------------------------------------------------------------------------------------- predictions

    def step(self, drafter: DraftCost, mean: MeanStep, context: float | None = None) -> float:
        """Seconds of a mean step."""
        drafting = mean.drafts * drafter.step + (0.0 if drafter.looked_up else self.chain)
        drafted = drafting + self.score(mean.rows, drafter.exit_layer, context) + self.fixed
        return mean.drafting * drafted + (1 - mean.drafting) * self.plain_step(context)

    def tokens_per_second(self, drafter: DraftCost, mean: MeanStep, context: float | None = None) -> float:
        """Of the whole batch."""
        return self.batch * mean.tokens / self.step(drafter, mean, context)

    def speedup(self, drafter: DraftCost, mean: MeanStep, context: float | None = None) -> float:
        """Over plain decoding of the same batch."""
        return mean.tokens * self.plain_step(context) / self.step(drafter, mean, context)


@dataclass(frozen=True)
class CostTables:
    """The tables of one model on one engine, a batch size each, ascending. ValueError for none, or another order."""

    batches: tuple[BatchCosts, ...]

    def __post_init__(self) -> None:
        sizes = [table.batch for table in self.batches]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"costs are of one batch size or several in ascending order, found {sizes}")

    def at(self, batch: int) -> BatchCosts:
        """The table of a batch size; between two that were measured it is between theirs. ValueError for one that is not."""
        if not self.batches[0].batch <= batch <= self.batches[-1].batch:
            known = ", ".join(str(table.batch) for table in self.batches)
            raise ValueError(f"costs were measured for batches of {known}, not for one of {batch}")
        above = next(table for table in self.batches if table.batch >= batch)
        if above.batch == batch:
            return above
        below = next(table for table in reversed(self.batches) if table.batch < batch)
        return _between(below, above, batch)


def _between(below: BatchCosts, above: BatchCosts, batch: int) -> BatchCosts:
    share = (batch - below.batch) / (above.batch - below.batch)

    def mixed(a: Any, b: Any) -> Any:
        if isinstance(a, CostCurve):
            places = tuple(sorted({*a.places, *b.places}))
            return CostCurve(places, _rising([mixed(a(place), b(place)) for place in places]))
        if isinstance(a, bool):
            return a or b
        if isinstance(a, dict):
            return {name: mixed(a[name], b[name]) for name in a if name in b}
        return a + share * (b - a)

    values = {one.name: mixed(getattr(below, one.name), getattr(above, one.name)) for one in fields(BatchCosts)}
    return BatchCosts(**{**values, "batch": batch, "context": round(values["context"])})


def _rising(values: Sequence[float]) -> tuple[float, ...]:
    """The same without the last digit's falls that sums of rising figures may have."""
    return tuple(max(values[: index + 1]) for index in range(len(values)))
