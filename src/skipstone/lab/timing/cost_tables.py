"""Measured costs of decoding on one machine, by batch size, in seconds of the whole batch. `measure_costs` fills them."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Self

import numpy as np

from skipstone.policy.cost_model import StepCosts


@dataclass(frozen=True)
class CostCurve:
    """A non-decreasing cost, measured at some places and interpolated linearly. Beyond the last place the last line goes on.
    ValueError unless places rise, and values are finite, at least 0 and never fall."""

    places: tuple[int, ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        rises = all(a < b for a, b in pairwise(self.places)) and all(a <= b for a, b in pairwise(self.values))
        are_costs = np.isfinite(self.values).all() and min(self.values, default=-1) >= 0
        if len(self.places) != len(self.values) or not rises or not are_costs:
            needs = "rising places with values that are finite, at least 0 and never fall"
            raise ValueError(f"a cost curve needs {needs}, found {self.places} and {self.values}")

    @classmethod
    def fitted(cls, values: dict[int, float]) -> Self:
        """The curve nearest to values by place, by least squares (pool adjacent violators): where measured values fall, their
        mean replaces all of them."""
        places, blocks = sorted(values), list[tuple[float, int]]()  # (sum, count)
        for place in places:
            blocks.append((values[place], 1))
            while len(blocks) > 1 and blocks[-2][0] * blocks[-1][1] > blocks[-1][0] * blocks[-2][1]:
                (a, m), (b, n) = blocks[-2:]
                blocks[-2:] = [(a + b, m + n)]
        means = [total / count for total, count in blocks for _ in range(count)]
        return cls(tuple(places), tuple(np.maximum.accumulate(means).tolist()))  # a mean may fall in its last digit

    def __call__(self, place: float) -> float:
        places, values = self.places, self.values
        if place <= places[-1] or len(places) == 1:
            return float(np.interp(place, places, values))
        return values[-1] + (place - places[-1]) / (places[-1] - places[-2]) * (values[-1] - values[-2])


@dataclass(frozen=True)
class BatchCosts:
    """Seconds of the parts of one step of a batch. ValueError for what cannot be seconds.

    batch: rows. context: committed tokens of every row during all measurements. plain: a whole step of plain decoding. fixed:
    a step without drafting and scoring. chain: a chain of drafts without its draft steps. scoring: n -> V(n), n tokens of every
    row scored, from a draft on the host to the verdict on the host. layers: n -> the part of it that the layers take. exits: E
    -> a draft step of the first E layers and the head; its last place is the depth L. attention, mlp: saved in a draft step by
    leaving out one such sublayer. layer: saved in addition if both of a layer are left out. ranked: added to a draft step that
    notes runners-up (SWIFT's trees). context_slope: n -> added to V(n) by one more token of context. draft_models:
    fingerprint -> a draft step of that model. spread: median over all entries of (median / minimum - 1) of their times. busy:
    other programs ran meanwhile, so all figures are too long, by about the same factor.
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
        single = [self.fixed, self.chain, self.attention, self.mlp, self.layer, self.ranked, self.spread, self.plain]
        costs = np.array([*single, *self.draft_models.values()])
        if not (np.isfinite(costs) & (costs >= 0)).all():
            raise ValueError("costs are finite and at least 0")
        if not (self.plain > 0 and self.scoring.values[0] > 0):
            raise ValueError(f"a plain step takes time, found {self.plain} seconds")

    @property
    def depth(self) -> int:
        return self.exits.places[-1]

    def score(self, tokens: float, exit_layer: int = 0, context: float | None = None) -> float:
        """V(n). exit_layer: number of layers that all but the last token have passed while drafting."""
        saved = exit_layer / self.depth * (self.layers(tokens) - self.layers(1))
        return self.scoring(tokens) - saved + self._extra_context(context) * self.context_slope(tokens)

    def plain_step(self, context: float | None = None) -> float:
        return self.plain + self._extra_context(context) * self.context_slope(1)

    def _extra_context(self, context: float | None) -> float:
        return 0.0 if context is None else context - self.context

    # ----------------------------------------------------------------------------------------------- drafters

    def of_exit(self, exit_layer: int, context: float | None = None) -> StepCosts:
        """The first E layers and the head draft."""
        return self._step_costs(self.exits(exit_layer), context, exit_layer)

    def of_skipping(
        self, attentions: int, mlps: int, both: int, *, ranked: bool = False, context: float | None = None
    ) -> StepCosts:
        """The model drafts without so many attentions and MLPs, both of `both` layers. ranked: runners-up are noted."""
        saved = self.attention * attentions + self.mlp * mlps + self.layer * both
        return self._step_costs(max(self.exits(self.depth) - saved, self.exits.values[0]) + self.ranked * ranked, context)

    def of_draft_model(self, fingerprint: str, context: float | None = None) -> StepCosts | None:
        """A draft model drafts; None if it was not measured."""
        return self._step_costs(self.draft_models[fingerprint], context) if fingerprint in self.draft_models else None

    def of_lookup(self, context: float | None = None) -> StepCosts:
        """No model drafts."""
        return StepCosts(self.plain_step(context), 0.0, lambda n: self.score(n, 0, context), fixed=self.fixed)

    def _step_costs(self, draft_step: float, context: float | None, exit_layer: int = 0) -> StepCosts:
        plain = self.plain_step(context)
        return StepCosts(plain, draft_step, lambda n: self.score(n, exit_layer, context), self.chain, self.fixed)


@dataclass(frozen=True)
class CostTables:
    """The costs of one model on one engine, by batch size, ascending. ValueError for none, or another order."""

    batches: tuple[BatchCosts, ...]

    def __post_init__(self) -> None:
        sizes = [table.batch for table in self.batches]
        if not sizes or sizes != sorted(set(sizes)):
            raise ValueError(f"costs are of one batch size or several in ascending order, found {sizes}")

    def at(self, batch: int) -> BatchCosts:
        """The costs of a batch size. ValueError if it was not measured."""
        tables = {table.batch: table for table in self.batches}
        if batch not in tables:
            raise ValueError(f"costs were measured for batches of {', '.join(map(str, tables))}, not for one of {batch}")
        return tables[batch]
