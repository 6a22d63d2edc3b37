"""What steps cost, believed from what was measured: a single surprise is damped, two in a row are believed.

Times of drafting and scoring are in plain steps, a plain step is in seconds. The table that `decoding/costs.py` describes,
where a machine has measured one, is where belief begins."""

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

GAIN = 0.1
"""Share of a difference that a measurement moves a belief by."""
CLAMP = 0.25
"""Largest difference that one measurement may count with, as a share of the belief."""
SURPRISE = 0.4
"""Difference from which on a measurement is a surprise, as a share of the belief."""
BELIEVED_AFTER = 2
"""Surprises in a row after which the latest one takes the belief's place."""
FIRST_SLOPE = 0.04
"""Plain steps that scoring one token more costs, before anything was measured."""
FIRST_SETUP, SETUP_DEVIATION = 0.1, 0.2
"""Plain steps that drafting takes beside its draft steps, before anything was measured, and how far off that may be."""
DRAFTING_NOISE = 0.1
"""Standard deviation of a time of drafting, as a share of it."""
DRAFTING_MEMORY = 50.0
"""Times of drafting after which one counts 1/e."""
LEAST_DRAFTING = 1e-6
"""Plain steps that drafting takes at least: a clock may stand still."""
MOST_CORRELATION = 0.95
"""Between the errors of the two parts of a time of drafting."""


@dataclass(frozen=True, slots=True)
class Cost:
    """A belief about a time that stays about the same. measurements: that it rests on; of a guess none. surprises: in a row, up
    to now."""

    value: float
    measurements: int = 0
    surprises: int = 0

    def observe(self, measured: float) -> "Cost":
        """One more measurement. The first one takes a guess's place, and the belief is the mean of the first few."""
        if not self.measurements:
            return Cost(measured, 1)
        difference = measured - self.value
        surprises = self.surprises + 1 if abs(difference) > SURPRISE * self.value else 0
        if surprises >= BELIEVED_AFTER:
            return Cost(measured, 1)
        most, measurements = CLAMP * self.value, self.measurements + 1
        gain = max(GAIN, 1 / measurements)
        return Cost(self.value + gain * min(max(difference, -most), most), measurements, surprises)


@dataclass(frozen=True, slots=True)
class Drafting:
    """A belief about what a chain of drafts takes: setup + step x drafts, learnt by recursive least squares, of which older
    times count less. A short draft is mostly setup: who took its time for that of its steps would draft ever less.

    measurements, surprises: as of a `Cost`. A first time far above a guess is a surprise too: what is done for the first time
    takes long. variances, covariance: of the errors of (setup, step)."""

    step: float
    setup: float = FIRST_SETUP
    measurements: int = 0
    surprises: int = 0
    variances: tuple[float, float] | None = None
    covariance: float = 0.0

    def __call__(self, drafts: int) -> float:
        """So many drafts."""
        return self.setup + self.step * drafts if drafts else 0.0

    def observe(self, drafts: int, measured: float) -> "Drafting":
        """So many drafts, one at least, took so long."""
        expected, measured = self(drafts), max(measured, LEAST_DRAFTING)
        difference = measured - expected
        surprising = abs(difference) > SURPRISE * expected
        if surprising and self.surprises + 1 >= BELIEVED_AFTER:
            factor = measured / expected
            return Drafting(max(self.step * factor, LEAST_DRAFTING / 2), self.setup * factor, 1)
        most = CLAMP * expected if self.measurements else expected + abs(difference)
        surprises = int(surprising and (self.measurements > 0 or difference > 0))
        widest = SETUP_DEVIATION**2, self.step**2
        (setup_variance, step_variance), covariance = self.variances or widest, self.covariance
        setup_gain, step_gain = setup_variance + covariance * drafts, covariance + step_variance * drafts
        noise, keep = (DRAFTING_NOISE * expected) ** 2, 1 - 1 / DRAFTING_MEMORY
        shrink = 1 / (setup_gain + step_gain * drafts + noise)
        moved = min(max(difference, -most), most) * shrink
        variances = (
            max(min((setup_variance - shrink * setup_gain**2) / keep, widest[0]), 0.0),
            max(min((step_variance - shrink * step_gain**2) / keep, widest[1]), 0.0),
        )
        limit = MOST_CORRELATION * (variances[0] * variances[1]) ** 0.5
        return Drafting(
            step=max(self.step + moved * step_gain, self.step / 4, LEAST_DRAFTING / 2),
            setup=max(self.setup + moved * setup_gain, 0.0),
            measurements=self.measurements + 1,
            surprises=self.surprises + surprises if surprises else 0,
            variances=variances,
            covariance=min(max((covariance - shrink * setup_gain * step_gain) / keep, -limit), limit),
        )


def _first_guess(tokens: float) -> float:
    """V before anything was measured."""
    return 1.0 + FIRST_SLOPE * (tokens - 1)


@dataclass(frozen=True, slots=True)
class Scoring:
    """V(n), what a pass that scores n tokens of every row costs, in plain steps: known where it was measured, on straight lines
    between, and behind the last place on the line through the last two. V(1) is 1, and from the first measured place on V never
    falls; there it may be below 1, where drafting has done a part of the scoring (an early exit's layers).

    places, values: the corners of the line."""

    known: Mapping[int, Cost] = field(default_factory=dict)  # n > 1 -> belief
    places: tuple[int, ...] = (1,)
    values: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, values: Mapping[int, float]) -> "Scoring":
        """From measured values by n."""
        known = {n: Cost(value, 1) for n, value in values.items() if n > 1}
        return cls(known, (1, *sorted(known)))._drawn()

    def observe(self, tokens: int, measured: float) -> "Scoring":
        """A pass over so many tokens took so long."""
        if tokens <= 1:
            return self
        before = self.known.get(tokens)
        if before is not None:
            return Scoring({**self.known, tokens: before.observe(measured)}, self.places)._drawn()
        line = Cost(self(tokens), 1)  # what the line says counts as one: one measurement alone may be an outlier
        places = tuple(sorted((*self.places, tokens)))
        return Scoring({**self.known, tokens: line.observe(measured)}, places)._drawn()

    def surprises(self, tokens: int) -> bool:
        """Whether the latest measurement of so many tokens was a surprise."""
        return tokens in self.known and self.known[tokens].surprises > 0

    def _drawn(self) -> "Scoring":
        values = accumulate((self.known[place].value for place in self.places[1:]), max)
        return Scoring(self.known, self.places, (1.0, *values))

    def __call__(self, tokens: float) -> float:
        places, values = self.places, self.values
        right = bisect_left(places, tokens)
        if right < len(places) and places[right] == tokens:
            return values[right]
        if right == len(places):
            if len(places) == 1:
                return _first_guess(tokens)
            right -= 1
            slope = (values[right] - values[right - 1]) / (places[right] - places[right - 1])
            return values[right] + max(slope, FIRST_SLOPE) * (tokens - places[right])
        left = right - 1
        share = (tokens - places[left]) / (places[right] - places[left])
        return values[left] + share * (values[right] - values[left])


@dataclass(frozen=True, slots=True)
class Costs:
    """plain: seconds of a plain step. scoring: V of drafts that nothing has run yet. scorings: drafter -> V of its drafts;
    until one is measured that of others is taken for it. fixed: what a step costs beside its drafting and its scoring as soon
    as it drafts. drafts: drafter -> its drafting. wholes: drafter that verifies by its own rule, too -> a whole step.
    shadows: drafter -> grading it on the latest tokens. lookup: finding a draft in the text."""

    plain: Cost
    scoring: Scoring = Scoring()
    scorings: Mapping[str, Scoring] = field(default_factory=dict)
    fixed: float = 0.02
    drafts: Mapping[str, Drafting] = field(default_factory=dict)
    wholes: Mapping[str, Cost] = field(default_factory=dict)
    shadows: Mapping[str, Cost] = field(default_factory=dict)
    lookup: float = 0.01

    def timed(self, seconds: float) -> "Costs":
        """A plain step took so long."""
        plain = self.plain.observe(seconds)
        return Costs(plain, self.scoring, self.scorings, self.fixed, self.drafts, self.wholes, self.shadows, self.lookup)

    def drafted(self, drafter: str, drafts: int, measured: float) -> "Costs":
        """So many drafts of a drafter took so long. What others take, as long as it is but guessed, was guessed as wrongly."""
        before = self.drafts[drafter]
        now = before.observe(drafts, measured)
        factor = now.step / before.step
        guessed = {name: Drafting(one.step * factor, now.setup) for name, one in self.drafts.items() if not one.measurements}
        return replace(self, drafts={**self.drafts, **guessed, drafter: now})

    def stepped(self, drafter: str, measured: float) -> "Costs":
        """A whole step of a drafter with its own rule took so long."""
        return replace(self, wholes={**self.wholes, drafter: self.wholes[drafter].observe(measured)})

    def scored(self, drafter: str | None, tokens: int, measured: float) -> "Costs":
        """Scoring so many tokens of every row took so long. drafter: whose drafts they were, None for no model's."""
        if drafter is None:
            return replace(self, scoring=self.scoring.observe(tokens, measured))
        return replace(self, scorings={**self.scorings, drafter: self.scoring_of(drafter).observe(tokens, measured)})

    def scoring_of(self, drafter: str) -> Scoring:
        return self.scorings.get(drafter, self.scoring)
