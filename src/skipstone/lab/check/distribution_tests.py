"""Tests of the distribution of sampled texts.

`compare` tests two samples against each other: chi-square tests of homogeneity, token by token and pair by pair. `TokenSample`
tests every token against its exact distribution given the text before it. Under that law each statistic minus its expectation
is a martingale, so sums over all tokens of all texts are normal. This finds faults a hundred times smaller than a comparison of
samples does.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skipstone.utils.extras import installed

MIN_EXPECTED_COUNT = 5.0  # of a cell; rarer values are pooled
ALPHA = 1e-6  # probability of a false alarm, all tests of a check together
BITS = 8  # halves of the vocabulary given by the lowest bits of the ids
RANDOM_HALVES = 8  # of the vocabulary
RARE = 1e-3  # share of impossible tokens that rounding at the edge of top-p explains, in float32
ROUNDED = 2e-2  # the same in half precision
MIN_PROBABILITY = 1e-9  # in logarithms

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class DistributionVerdict:
    """The result of several tests of the hypothesis that both follow the same law."""

    p_value: float  # the smallest one times the number of tests (Bonferroni)
    where: str  # the test with the smallest p-value
    tests: int  # number of tests; 0 if there was nothing to compare

    @property
    def same(self) -> bool:
        """Whether no test rejects the hypothesis."""
        return self.p_value >= ALPHA


def _smallest(found: Sequence[tuple[float, str]]) -> DistributionVerdict:
    """found: (p-value, name) of every test."""
    if not found:
        return DistributionVerdict(1.0, "", 0)
    p_value, where = min(found)
    return DistributionVerdict(min(1.0, p_value * len(found)), where, len(found))


def ready() -> Any:
    """scipy.stats. ImportError that says what to install without it."""
    return installed("scipy.stats", "comparing laws needs scipy")


def compare(one: Texts, other: Texts) -> DistributionVerdict:
    """Two samples of texts of the same prompt."""
    return _smallest([(p, where) for where, a, b in _tables(one, other) if (p := homogeneity(a, b)) is not None])


def _tables(one: Texts, other: Texts) -> Iterator[tuple[str, Counter[Any], Counter[Any]]]:
    """(name, counts of one, counts of the other) of every position, every pair of neighbours, and the lengths."""
    longest = max(map(len, (*one, *other)), default=0)
    spans = [(place, place + 1) for place in range(longest)] + [(place, place + 2) for place in range(longest - 1)]
    for first, end in spans:
        a, b = (Counter(tuple(text[first:end]) for text in texts) for texts in (one, other))
        yield f"token {first}" if end == first + 1 else f"tokens {first} and {first + 1}", a, b
    yield "length", Counter(map(len, one)), Counter(map(len, other))


def homogeneity(one: Counter[Any], other: Counter[Any]) -> float | None:
    """The p-value of the hypothesis that both counts have the same law, or None if there is one value only.

    A chi-square test with rare values pooled.
    """
    total = one + other
    share = min(one.total(), other.total()) / total.total()
    columns = [(one[value], other[value]) for value, count in total.items() if count * share >= MIN_EXPECTED_COUNT]
    rest = one.total() - sum(count for count, _ in columns), other.total() - sum(count for _, count in columns)
    if sum(rest) * share >= MIN_EXPECTED_COUNT:
        columns.append(rest)
    if len(columns) < 2:
        return None
    return float(ready().chi2_contingency([*zip(*columns, strict=True)], correction=False).pvalue)


class TokenSample:
    """Tests drawn tokens against their exact distributions. Tokens are added in parts.

    Statistics: log-probabilities, frequency of the best token, and halves of the vocabulary. A token of probability 0 is a
    fault by itself. rare: share of such tokens that rounding explains.
    """

    def __init__(self, rare: float = RARE, seed: int = 0) -> None:
        self.rare, self.seed = rare, seed
        self.tokens = self.impossible = 0
        self.surplus: defaultdict[str, float] = defaultdict(float)
        self.variance: defaultdict[str, float] = defaultdict(float)

    def add(self, p: Tensor, tokens: Tensor) -> None:
        """p: [N, V], the distribution of each token. tokens: [N] int64, of independent texts or successive in one text."""
        p = p.double()
        drawn = p.gather(1, tokens[:, None]).squeeze(1)
        self.tokens += len(tokens)
        self.impossible += int((drawn == 0).sum())
        log_p = p.clamp_min(MIN_PROBABILITY).log()
        best, where = p.max(1)
        self._count("log-probabilities", drawn.clamp_min(MIN_PROBABILITY).log(), (p * log_p).sum(1), (p * log_p**2).sum(1))
        self._count("the best token", (tokens == where).double(), best, best)
        halves = _halves(p.shape[1], self.seed).to(p)
        expected = p @ halves
        for index in range(BITS + RANDOM_HALVES):
            self._count(f"half {index} of the vocabulary", halves[tokens, index], expected[:, index], torch.ones_like(best))

    def _count(self, name: str, value: Tensor, mean: Tensor, square: Tensor) -> None:
        self.surplus[name] += float((value - mean).sum())
        self.variance[name] += float((square - mean**2).clamp_min(0).sum())

    def law(self) -> DistributionVerdict:
        """The result over all added tokens."""
        if self.impossible > max(2, self.rare * self.tokens):
            return DistributionVerdict(0.0, f"{self.impossible} of {self.tokens} tokens have probability 0", 1)
        found = []
        for name, variance in self.variance.items():
            if variance > MIN_EXPECTED_COUNT:
                z = self.surplus[name] / variance**0.5
                found.append((math.erfc(abs(z) / 2**0.5), f"{name}, z = {z:.1f}"))
        return _smallest(found)


def _halves(size: int, seed: int) -> Tensor:
    """[V, BITS + RANDOM_HALVES] float64 of 1 and -1."""
    ids = torch.arange(size, dtype=torch.int64, device="cpu")[:, None]
    bits = (ids >> torch.arange(BITS, dtype=torch.int64, device="cpu")) & 1
    dice = torch.Generator().manual_seed(seed)
    drawn = torch.randint(0, 2, (size, RANDOM_HALVES), generator=dice, dtype=torch.int64, device="cpu")
    return torch.cat([bits, drawn], 1).double() * 2 - 1
