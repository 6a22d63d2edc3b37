"""What steps cost, believed from what was measured: a single surprise is damped, two in a row are believed.

Times of drafting and scoring are in plain steps, a plain step is in seconds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from statistics import median_low

import numpy as np

GAIN = 0.1
"""Share of a difference that a measurement moves a belief by."""
PLAIN_GAIN = 0.25
"""The same of a plain step: they are measured seldom, and all else is held against them."""
CLAMP = 0.25
"""Largest difference that one measurement may count with, as a share of the belief."""
SURPRISE = 0.4
"""Difference from which on a measurement is a surprise, as a share of the belief."""
BELIEVED_AFTER, LINE_BELIEVED_AFTER = 2, 3
"""Surprises in a row after which the latest one takes the belief's place, and the place of a line. That the machine is slower
as a whole is found out before (`state.Pace`)."""
FIRST_SLOPE = 0.04
"""Plain steps that scoring one token more costs, before anything was measured."""
FIRST_START, START_DEVIATION = 0.1, 0.2
"""Plain steps that drafting takes beside its draft steps, before anything was measured, and how far off the start of a line may
be."""
LINE_NOISE = 0.1
"""Standard deviation of a time beside its line, as a share of it."""
LINE_MEMORY = 50.0
"""Times after which one counts 1/e in a line."""
LEAST_TIME = 1e-6
"""Plain steps that anything takes at least: a clock may stand still."""
MOST_CORRELATION = 0.95
"""Between the errors of the two parts of a line."""
PLACE_DOUBT = 4.0
"""Measurements of one number of tokens that count as much as the line through all numbers does."""
PLACE_MEMORY = 1000.0
"""Scoring passes of any number of tokens after which what was measured of one number counts 1/e."""
LEAST_TABLE = 32
"""Numbers of tokens whose scoring is worked out beforehand."""
LEAST_WEIGHT = 0.1
"""Measurements that a place is worth at least; one that has faded to less is forgotten."""
LEAST_PLAIN = 3
"""Plain steps that are timed before anything is drafted."""
WELL_KNOWN = 24
"""Measurements from which on a cost is known well."""
FIRST_DRAFTS = 8
"""Drafts of a row, at most, while none were scored."""
MOST_TYPICAL = 1.5
"""Times the lower median of several equal steps that one of them counts as at most: more was the doing of something else."""


def typical(seconds: Sequence[float]) -> float:
    """What one of several equal steps takes, 0 of none. It is their mean: steps that draft are counted by what they take in the
    mean, too, and the median of plain ones lies below theirs."""
    if not seconds:
        return 0.0
    most = MOST_TYPICAL * median_low(seconds)
    return sum([min(one, most) for one in seconds]) / len(seconds)


@dataclass(frozen=True, slots=True)
class Cost:
    """A belief about a time that stays about the same. measurements: that it rests on; of a guess none. surprises: in a row, up
    to now."""

    value: float
    measurements: int = 0
    surprises: int = 0

    def observe(self, measured: float, times: int = 1, each: float = GAIN) -> "Cost":
        """One more measurement, or what is typical of so many. The first one takes a guess's place, and the belief is the mean
        of the first few. each: share of a difference that one measurement moves the belief by."""
        if not self.measurements:
            return Cost(measured, times)
        difference = measured - self.value
        surprises = self.surprises + times if abs(difference) > SURPRISE * self.value else 0
        if surprises >= BELIEVED_AFTER:
            return Cost(measured, times)
        most, measurements = CLAMP * self.value * times, self.measurements + times
        gain = max(1 - (1 - each) ** times, times / measurements)
        return Cost(self.value + gain * min(max(difference, -most), most), measurements, surprises)


@dataclass(frozen=True, slots=True)
class Line:
    """A belief about what a chain takes: start + step x its length, learnt by recursive least squares, of which older times
    count less. Where the step can fall no further, the start gives way. A short draft is mostly start: who took its time for
    that of its steps would draft ever less.

    measurements, surprises: as of a `Cost`. A first time far above a guess is a surprise too: what is done for the first time
    takes long. variances, covariance: of the errors of (start, step)."""

    step: float
    start: float = FIRST_START
    measurements: int = 0
    surprises: int = 0
    variances: tuple[float, float] | None = None
    covariance: float = 0.0

    def __call__(self, length: float) -> float:
        """A chain of so many."""
        return self.start + self.step * length if length else 0.0

    @property
    def well_known(self) -> bool:
        """Whether many measurements say the same."""
        return self.measurements >= WELL_KNOWN and not self.surprises

    @property
    def guess(self) -> "Line":
        """The same as a guess: what something like it is thought to take."""
        return Line(self.step, self.start)

    def observe(self, length: int, measured: float) -> "Line":
        """A chain of so many, one at least, took so long."""
        expected, measured = self(length), max(measured, LEAST_TIME)
        difference = measured - expected
        surprising = abs(difference) > SURPRISE * expected
        if surprising and self.surprises + 1 >= (
            LINE_BELIEVED_AFTER if self.measurements - self.surprises > 1 else BELIEVED_AFTER
        ):
            factor = measured / expected
            return Line(max(self.step * factor, LEAST_TIME / 2), self.start * factor, 1)
        most = CLAMP * expected if self.measurements else expected + abs(difference)
        surprises = int(surprising and (self.measurements > 0 or difference > 0))
        widest = START_DEVIATION**2, max(self.step, FIRST_SLOPE) ** 2
        (start_variance, step_variance), covariance = self.variances or widest, self.covariance
        start_gain, step_gain = start_variance + covariance * length, covariance + step_variance * length
        noise, keep = (LINE_NOISE * expected) ** 2, 1 - 1 / LINE_MEMORY
        shrink = 1 / (start_gain + step_gain * length + noise)
        moved = min(max(difference, -most), most) * shrink
        step = max(self.step + moved * step_gain, self.step / 4, LEAST_TIME / 2)
        start = max(self.start + moved * start_gain + (self.step + moved * step_gain - step) * length, 0.0)
        variances = (
            max(min((start_variance - shrink * start_gain**2) / keep, widest[0]), 0.0),
            max(min((step_variance - shrink * step_gain**2) / keep, widest[1]), 0.0),
        )
        limit = MOST_CORRELATION * (variances[0] * variances[1]) ** 0.5
        return Line(
            step=step,
            start=start,
            measurements=self.measurements + 1,
            surprises=self.surprises + surprises if surprises else 0,
            variances=variances,
            covariance=min(max((covariance - shrink * start_gain * step_gain) / keep, -limit), limit),
        )


@dataclass(frozen=True, slots=True)
class Scoring:
    """V(n), what a pass that scores n tokens of every row costs, in plain steps: a line through all numbers, and what was
    measured of single ones beside it. So one outlier makes no wall that drafts never cross again, and a step that there is in
    the times of longer passes is learnt. V(1) is 1, and from 2 on V never falls; it may be below 1 there, where drafting has
    done a part of the scoring (an early exit's layers).

    line: over n - 1. known: n > 1 -> mean of what was measured, and of how many measurements, of which older ones count less.
    table: V(0), V(1), ...; behind them V goes on as the line does."""

    line: Line = Line(FIRST_SLOPE, 1.0)
    known: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    table: tuple[float, ...] = (0.0, 1.0, 1.0 + FIRST_SLOPE)

    @classmethod
    def of(cls, values: Mapping[int, float]) -> "Scoring":
        """As if values by n had been measured for long."""
        found = cls()
        for n, value in values.items():
            found = found.observe(n, value)
        return cls._drawn(found.line, {n: (value, 1000 * PLACE_DOUBT) for n, value in values.items() if n > 1})

    @property
    def guess(self) -> "Scoring":
        """The same as a guess, for the drafts of another drafter."""
        return self._drawn(self.line.guess, {})

    def among(self, times: float) -> "Scoring":
        """The same as a guess where so many times as many rows decode: a pass over n tokens of each is one over times n tokens
        of one, beside one over `times`."""
        step = self.line.step * times / (1 + self.line.step * (times - 1))
        return self._drawn(Line(max(step, LEAST_TIME), 1.0), {})

    def observe(self, tokens: int, measured: float) -> "Scoring":
        """A pass over so many tokens took so long."""
        if tokens <= 1:
            return self
        before, most = self(tokens), CLAMP * self(tokens)
        line = self.line.observe(tokens - 1, measured)
        if line.measurements <= 1:  # the first one, or two surprises in a row: what was known of single places is past
            return self._drawn(line, {})
        keep = 1 - 1 / PLACE_MEMORY
        known = {n: (mean, weight * keep) for n, (mean, weight) in self.known.items() if weight > LEAST_WEIGHT}
        mean, weight = known.get(tokens, (before, 0.0))
        value = min(max(measured, before - most), before + most)
        known[tokens] = (mean + (value - mean) / (weight + 1), weight + 1)
        return self._drawn(line, known)

    @property
    def reach(self) -> int:
        """Drafts of a row at most: twice as many tokens as were scored, as further away nothing is known of what that takes."""
        return max(FIRST_DRAFTS, 2 * max(self.known, default=0))

    @property
    def surprised(self) -> bool:
        """Whether the latest measurement was a surprise."""
        return self.line.surprises > 0

    @classmethod
    def _drawn(cls, line: Line, known: Mapping[int, tuple[float, float]]) -> "Scoring":
        places = sorted({2, *known})
        values = [line(n - 1) for n in places]
        for place, n in enumerate(places):
            if n in known:
                mean, weight = known[n]
                values[place] += (mean - values[place]) * weight / (weight + PLACE_DOUBT)
        table = np.interp(range(2, places[-1] + 1), places, list(accumulate(values, max))).tolist()
        last, further = table[-1], range(1, LEAST_TABLE - places[-1] + 1)
        return cls(line, known, (0.0, 1.0, *table, *(last + line.step * beyond for beyond in further)))

    def __call__(self, tokens: float) -> float:
        table = self.table
        last = len(table) - 1
        if type(tokens) is int and tokens <= last:  # asked for most often
            return table[tokens]
        below = int(tokens)
        if below >= last:
            return table[last] + self.line.step * (tokens - last)
        return table[below] + (table[below + 1] - table[below]) * (tokens - below)


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
    drafts: Mapping[str, Line] = field(default_factory=dict)
    wholes: Mapping[str, Cost] = field(default_factory=dict)
    shadows: Mapping[str, Cost] = field(default_factory=dict)
    lookup: float = 0.01

    def learnt(self, measured: float) -> "Costs":
        """A step that drafted took so much beside its drafting and its scoring."""
        fixed = self.fixed + GAIN * (measured - self.fixed)
        return Costs(self.plain, self.scoring, self.scorings, fixed, self.drafts, self.wholes, self.shadows, self.lookup)

    def timed(self, seconds: float, steps: int = 1) -> "Costs":
        """A plain step took so long, or so many typically did."""
        return self.paced(self.plain.observe(seconds, steps, PLAIN_GAIN))

    def paced(self, plain: Cost) -> "Costs":
        """Another belief about plain steps, which all other times are multiples of."""
        return Costs(plain, self.scoring, self.scorings, self.fixed, self.drafts, self.wholes, self.shadows, self.lookup)

    def drafted(self, drafter: str, drafts: int, measured: float) -> "Costs":
        """So many drafts of a drafter took so long. What others take, as long as it is but guessed, was guessed as wrongly."""
        before = self.drafts[drafter]
        now = before.observe(drafts, measured)
        factor = now.step / before.step
        guessed = {name: Line(one.step * factor, now.start) for name, one in self.drafts.items() if not one.measurements}
        known = {**self.drafts, **guessed, drafter: now}
        return Costs(self.plain, self.scoring, self.scorings, self.fixed, known, self.wholes, self.shadows, self.lookup)

    def stepped(self, drafter: str, measured: float) -> "Costs":
        """A whole step of a drafter with its own rule took so long."""
        return replace(self, wholes={**self.wholes, drafter: self.wholes[drafter].observe(measured)})

    def scored(self, drafter: str | None, tokens: int, measured: float) -> "Costs":
        """Scoring so many tokens of every row took so long. drafter: whose drafts they were, None for no model's."""
        if drafter is None:
            return replace(self, scoring=self.scoring.observe(tokens, measured))
        before = self.scorings.get(drafter) or self.scoring.guess
        scorings = {**self.scorings, drafter: before.observe(tokens, measured)}
        return Costs(self.plain, self.scoring, scorings, self.fixed, self.drafts, self.wholes, self.shadows, self.lookup)

    def anew(self, drafter: str | None) -> "Costs":
        """What a drafter's drafting and scoring take, or scoring what no model drafts, as a guess that the next measurement
        replaces: it was measured long ago."""
        if drafter is None:
            return replace(self, scoring=self.scoring.guess)
        drafts = {**self.drafts, drafter: self.drafts[drafter].guess}
        return replace(self, drafts=drafts, scorings={**self.scorings, drafter: self.scoring_of(drafter).guess})

    def scoring_of(self, drafter: str) -> Scoring:
        return self.scorings.get(drafter, self.scoring)
