"""The time of a step, and the speed-up that follows from it.

`StepCosts` holds the times of the parts of a step of one drafter. `skipstone.lab.timing` fills it by calibration, and
`LearnedCosts` from the steps of the loop. No other file computes expected tokens or a speed-up.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

from skipstone.policy.draft_length import LOOKAHEAD

FIRST_SLOPE = 0.04  # first guess of the plain steps that scoring one more token takes: 25 tokens double a pass on two CPU cores
FIRST_START = 0.1  # first guess of the plain steps that a chain takes besides its draft steps
RELATIVE_NOISE = 0.1  # standard deviation of a measured time, as a share of it
START_DEVIATION = 2 * FIRST_START  # standard deviation of the start of a line around its guess, in plain steps
MEMORY = 50.0  # measurements of drafting or scoring after which one counts 1/e
PLAIN_MEMORY = 4.0  # the same for plain steps and replays, which are seldom timed
MAX_CHANGE = 0.25  # largest relative difference between a measurement and the belief that counts: a stall says little
PLACE_DOUBT = 4.0  # measurements of one number of tokens that count as much as the line through all numbers
TABLE = 64  # numbers of tokens for which V is worked out: a tree of recycled tokens has at most 63 nodes
WELL_KNOWN = 24  # measurements of a belief that then differs by 2 % from the mean (.1 / sqrt(24))
ALMOST_ONE = 1e-9  # what an acceptance of 1 lacks in a geometric sum
HOST = ""  # the drafter of tokens that no model drafts: looked up, or recycled


@dataclass(frozen=True)
class StepCosts:
    """Times of the parts of one step, all in one unit (seconds, or plain steps). Numbers, or arrays that broadcast.

    plain: a step of plain decoding. start, draft_step: a chain of k drafts takes start + k draft_step. scoring: n -> a pass
    over n tokens of every row, V(n). fixed: the rest of a step that drafts.
    """

    plain: float
    draft_step: float
    scoring: Callable[[Any], float]
    start: float = 0.0
    fixed: float = 0.0

    def step(self, drafts: float, scored: float | None = None) -> float:
        """The time of a step of so many drafts. scored: tokens of each row that are scored, drafts + 1 if None."""
        scoring = self.scoring(drafts + 1 if scored is None else scored)
        return (drafts > 0) * self.start + drafts * self.draft_step + scoring + self.fixed

    def speedup(self, tokens: float, drafts: float, scored: float | None = None, drafting: float = 1.0) -> float:
        """The speed-up over plain decoding, M / (d c + v).

        tokens: M, committed by a mean step, plain steps included. drafting: share of the steps that draft.
        """
        return speedup(tokens, drafting * self.step(drafts, scored) + (1 - drafting) * self.plain, self.plain)


def speedup(tokens: float, step: float, plain: float) -> float:
    """Tokens of a step over those that plain decoding commits in the same time. step, plain: times of a step."""
    return tokens * plain / step


def expected_tokens(acceptance: float, drafts: float) -> float:
    """M of a step if each draft is accepted with the same probability: 1 + a + ... + a^k (arXiv 2211.17192, Eq. 1)."""
    acceptance = acceptance - (acceptance >= 1) * ALMOST_ONE
    return (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def typical(seconds: Sequence[float]) -> float:
    """What one of several equal steps takes: their mean, in which a stall counts as twice the median at most. 0 of none."""
    if not seconds:
        return 0.0
    limit = 2 * median_low(seconds)
    return sum([min(one, limit) for one in seconds]) / len(seconds)


@dataclass(slots=True)
class MeanTime:
    """A belief about one time. measurements: 0 for a guess, which the first measurement replaces."""

    value: float
    measurements: float = 0

    def observe(self, time: float) -> None:
        if not self.measurements:
            self.value = time
        self.measurements = min(self.measurements + 1, PLAIN_MEMORY)
        self.value += (min(time, 2 * self.value) - self.value) / self.measurements


@dataclass(slots=True)
class LineTime:
    """A belief about times that grow with a length: start + step x length, by regularised least squares around a guess.

    sums: discounted, over measurements, of 1, length, length^2, error and length x error, where the error is the distance from
    the guess. Each measurement counts by its relative error.
    """

    start: float
    step: float
    measurements: int = 0
    guess: tuple[float, float] = (0.0, 0.0)
    sums: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def __call__(self, length: float) -> float:
        return self.start + self.step * length

    def observe(self, length: float, time: float) -> None:
        believed, keep = self(length), 1 - 1 / MEMORY
        if not self.measurements:  # a guess: a time far from it replaces it
            if abs(time / believed - 1) > MAX_CHANGE:
                self.start, self.step, believed = self.start * time / believed, self.step * time / believed, time
            self.guess, self.sums = (self.start, self.step), (0.0, 0.0, 0.0, 0.0, 0.0)
        self.measurements += 1
        start, step = self.guess
        change = min(max(time - believed, -MAX_CHANGE * believed), MAX_CHANGE * believed)
        error, weight = believed + change - start - step * length, 1 / believed**2
        one, n, nn, e, ne = self.sums
        one, n, nn = one * keep + weight, n * keep + weight * length, nn * keep + weight * length * length
        e, ne = e * keep + weight * error, ne * keep + weight * length * error
        self.sums = one, n, nn, e, ne
        one += (RELATIVE_NOISE / START_DEVIATION) ** 2
        nn += (RELATIVE_NOISE / max(step, FIRST_SLOPE)) ** 2
        self.step = max(step + (one * ne - n * e) / (one * nn - n * n), step / MEMORY)
        self.start = max(start + (e - n * (self.step - step)) / one, 0.0)


@dataclass(slots=True)
class ScoringTime:
    """V(n), the time of a pass that scores n tokens of every row: a line, corrected at the numbers that were measured.

    A sudden step in the times is learnt, but one outlier makes no wall that drafts never cross again. V(1) is 1. From 2 on V
    never falls; it may be below 1 if drafting has run a part of the layers. line: over n - 1. places: n -> (mean,
    measurements). table: V(0), V(1), ...
    """

    line: LineTime = field(default_factory=lambda: LineTime(1.0, FIRST_SLOPE))
    places: dict[int, tuple[float, float]] = field(default_factory=dict)
    table: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.table:
            self.draw()

    def __call__(self, tokens: float) -> float:
        low = int(tokens)
        if low >= TABLE:
            return self.table[TABLE] + self.line.step * (tokens - TABLE)
        return self.table[low] + (self.table[low + 1] - self.table[low]) * (tokens - low)

    @property
    def max_drafts(self) -> int:
        """Maximal number of drafts of a row: twice the tokens that were scored, because V is unknown beyond."""
        return min(max(LOOKAHEAD, 2 * max(self.places, default=0)), TABLE - 1)

    def among(self, times: float) -> "ScoringTime":
        """A guess for `times` as many rows: a pass over n tokens of each is one over times x n tokens of one row."""
        step = self.line.step * times / (1 + self.line.step * (times - 1))
        return ScoringTime(LineTime(1.0, step if step > 0 else self.line.step))

    def observe(self, tokens: float, time: float) -> None:
        """Learns the time of a pass over more than one token of every row."""
        n, believed = max(round(tokens), 2), self(tokens)
        if not self.line.measurements and abs(time / believed - 1) > MAX_CHANGE:
            self.places = {}
        self.line.observe(tokens - 1, time)
        mean, count = self.places.get(n, (believed, 0.0))
        count = min(count + 1, MEMORY)
        near = min(max(time, believed * (1 - MAX_CHANGE)), believed * (1 + MAX_CHANGE)) if self.line.measurements > 1 else time
        self.places[n] = mean + (near - mean) / count, count
        self.draw()

    def draw(self) -> None:
        """Computes the table. An unmeasured number differs from the line as much as the next smaller measured one."""
        line, value, offset, table = self.line, 0.0, 0.0, [0.0, 1.0]
        for n in range(2, TABLE + 2):
            if n in self.places:
                mean, count = self.places[n]
                offset = (mean - line.start - line.step * (n - 1)) * count / (count + PLACE_DOUBT)
            value = max(value, line.start + line.step * (n - 1) + offset)
            table.append(value)
        self.table = table


@dataclass(slots=True)
class LearnedCosts:
    """Times of steps, measured by the loop. All but `plain` are in plain steps, which a slower machine does not change.

    plain: seconds of a plain step. fixed: of a step that drafts, without drafting and scoring. drafting: drafter -> a chain.
    scoring: drafter -> V of its drafts; one without an entry takes that of HOST. schedules: drafter with its own schedule -> a
    whole step. replays: drafter -> a replay. timed_at: drafter -> position at which this process timed it.
    """

    plain: MeanTime
    fixed: float = 0.0
    drafting: dict[str, LineTime] = field(default_factory=dict)
    scoring: dict[str, ScoringTime] = field(default_factory=lambda: {HOST: ScoringTime()})
    schedules: dict[str, MeanTime] = field(default_factory=dict)
    replays: dict[str, MeanTime] = field(default_factory=dict)
    timed_at: dict[str, int] = field(default_factory=dict)

    def scoring_of(self, drafter: str) -> ScoringTime:
        return self.scoring.get(drafter) or self.scoring[HOST]

    def of(self, drafter: str) -> StepCosts:
        """The record of one drafter, in plain steps."""
        if drafter in self.schedules:
            return StepCosts(1.0, 0.0, lambda _: self.schedules[drafter].value)
        chain = self.drafting.get(drafter, LineTime(0.0, 0.0))
        return StepCosts(1.0, chain.step, self.scoring_of(drafter), chain.start, self.fixed)

    def _beliefs(self, drafter: str) -> "list[MeanTime | LineTime]":
        """Those of a drafter alone; of tokens that no model drafts, those of HOST."""
        known = [times[drafter] for times in (self.schedules, self.drafting) if drafter in times]
        return [*known, *([self.scoring_of(drafter).line] if drafter in self.scoring or not known else [])]

    def measurements(self, drafter: str) -> float:
        """Number of measurements of a drafter."""
        return self._beliefs(drafter)[0].measurements

    def doubt(self, drafter: str) -> None:
        """A drafter's times become guesses: the next measurement far from them replaces them."""
        for belief in self._beliefs(drafter):
            belief.measurements = 0

    def observe_scoring(self, drafter: str, tokens: float, time: float) -> None:
        """Learns V from one pass. HOST learns from other drafters until its own drafts are timed."""
        if drafter not in self.scoring:
            host = self.scoring[HOST]
            self.scoring[drafter] = ScoringTime(replace(host.line, measurements=0), {}, list(host.table))
        for name in [drafter] if HOST in (*self.timed_at, drafter) else [drafter, HOST]:
            self.scoring[name].observe(tokens, time)
