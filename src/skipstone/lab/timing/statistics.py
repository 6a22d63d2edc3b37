"""The arithmetic of the benchmark, pure: shares, pooled rates, intervals.

Rates are always total over total (tokens / seconds, accepted / drafted), never means of ratios.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

NGRAM = 8  # tokens in a row that count as repeated when they occurred before
LOOPING = 0.2  # prompts with at least this share of repeated output are kept out of the headline
RESAMPLES = 10_000  # of a bootstrap
LEVEL = 0.95  # coverage of an interval
BLOCKS = 200  # more units than this are resampled in so many random blocks: the interval is the same, the work is not

Column = Sequence[float] | NDArray[np.float64]


@dataclass(frozen=True)
class IntervalEstimate:
    """A value with the interval that covers it with probability LEVEL."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def repeated_share(prompt: Sequence[int], output: Sequence[int], n: int = NGRAM) -> float:
    """Share of output tokens covered by an n-gram that occurred earlier in prompt + output.

    An n-gram occurred earlier when the same n tokens start at a smaller index (the two may overlap); it may begin in the
    prompt. Looping text has a share near 1, and flatters every method that drafts. 0 for an empty output.
    """
    if not output:
        return 0.0
    text = [*prompt, *output]
    covered = [False] * len(text)
    seen: set[tuple[int, ...]] = set()
    for start in range(len(text) - n + 1):
        gram = tuple(text[start : start + n])
        if gram in seen:
            covered[start : start + n] = [True] * n
        seen.add(gram)
    return sum(covered[len(prompt) :]) / len(output)


def pooled(amounts: Column, costs: Column) -> float:
    """sum(amounts) / sum(costs), nan where nothing was spent."""
    total = float(np.sum(costs))
    return float(np.sum(amounts)) / total if total else float("nan")


@dataclass(frozen=True)
class PooledRate:
    """A pooled rate, and the same of every resample of its units (prompts, sequences).

    resampled: [resamples] float64. Rates over the same units with the same seed are paired: a resampled unit takes the
    measurements of all of them along, and what is common to them (its length, how predictable it is) cancels in a ratio.
    """

    value: float
    resampled: NDArray[np.float64]
    units: int

    def __truediv__(self, other: "PooledRate") -> "PooledRate":
        """The paired ratio of two rates. ValueError for rates over different units."""
        if self.units != other.units:
            raise ValueError(f"a paired comparison needs the same prompts on both sides, found {self.units} and {other.units}")
        value = self.value / other.value if other.value else float("nan")
        return PooledRate(value, self.resampled / other.resampled, self.units)

    def estimate(self) -> IntervalEstimate:
        """The rate with its percentile bootstrap interval."""
        low, high = np.quantile(self.resampled, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return IntervalEstimate(self.value, float(low), float(high))


def mean(values: Column, seed: int = 0) -> IntervalEstimate:
    """The mean of values, one per unit, with Wilson's interval if all of them are 0 or 1, else with a bootstrap interval.
    ValueError without a value."""
    if len(values) and {*values} <= {0.0, 1.0}:
        return _share(float(np.sum(values)), len(values))
    return rate(values, np.ones(len(values)), seed).estimate()


def _share(count: float, total: int) -> IntervalEstimate:
    """count / total with Wilson's score interval, which is right for shares near 0 and 1, too."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    value, centre, scale = count / total, (count + z * z / 2) / (total + z * z), z / (1 + z * z / total)
    half = scale * math.sqrt(value * (1 - value) / total + (z / total / 2) ** 2)
    return IntervalEstimate(value, max(0.0, centre - half), min(1.0, centre + half))


def rate(amounts: Column, costs: Column, seed: int = 0, resamples: int = RESAMPLES) -> PooledRate:
    """sum(amounts) / sum(costs), and of every resample of the entries. ValueError without an entry."""
    columns = [np.asarray(column, dtype=np.float64) for column in (amounts, costs)]
    if len(amounts) > BLOCKS:  # drawn at random, and the same in both columns
        block = np.random.default_rng(seed).permutation(len(amounts)) % BLOCKS
        columns = [np.bincount(block, column, BLOCKS) for column in columns]
    sums = _resampled(len(columns[0]), seed, resamples) @ np.stack(columns, 1)
    return PooledRate(pooled(amounts, costs), sums[:, 0] / sums[:, 1], len(amounts))


@lru_cache(maxsize=16)
def _resampled(units: int, seed: int, resamples: int) -> NDArray[np.float64]:
    """[resamples, units]: how often each unit was drawn in each resample."""
    if units == 0:
        raise ValueError("a bootstrap needs at least one unit, found none")
    return np.random.default_rng(seed).multinomial(units, np.full(units, 1 / units), size=resamples).astype(np.float64)
