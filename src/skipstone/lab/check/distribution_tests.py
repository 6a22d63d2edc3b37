"""Whether sampled texts follow the law that they should.

`compare`: two samples against one another, chi-square tests of homogeneity, token by token and pair by pair. `TokenSample`:
every token against the very distribution it should have been drawn from, given what stands before it. Under that law each
figure's surplus over its expectation is a martingale, so sums over all tokens of all texts are normal; this sees a hundred
times smaller faults than comparing samples does.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skipstone.utils.extras import installed

LEAST = 5.0  # expected count of a cell; what is rarer is pooled
ALPHA = 1e-6  # a false alarm in a million checks, all tests of a check together
BITS = 8  # halves of the vocabulary that are counted by the lowest bits of the ids
SIGNS = 8  # halves of the vocabulary that are drawn at random
RARE = 1e-3  # share of impossible tokens that rounding at the edge of top-p explains, in float32
ROUNDED = 2e-2  # the same in half precision
LEAST_P = 1e-9  # a probability below it counts as this one in logarithms

Texts = Sequence[Sequence[int]]


@dataclass(frozen=True)
class DistributionVerdict:
    """The verdict of several tests of "both follow the same law"."""

    p_value: float  # the smallest, times the number of tests (Bonferroni)
    where: str  # which test that was
    tests: int  # how many there were; 0 means that the texts left nothing to compare

    @property
    def same(self) -> bool:
        """Whether no test stands out."""
        return self.p_value >= ALPHA


def _smallest(found: Sequence[tuple[float, str]]) -> DistributionVerdict:
    """found: (p-value, which test) of every test."""
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
    """Every position, every pair of neighbours, and lengths."""
    longest = max(map(len, (*one, *other)), default=0)
    spans = [(place, place + 1) for place in range(longest)] + [(place, place + 2) for place in range(longest - 1)]
    for first, end in spans:
        a, b = (Counter(tuple(text[first:end]) for text in texts) for texts in (one, other))
        yield f"token {first}" if end == first + 1 else f"tokens {first} and {first + 1}", a, b
    yield "length", Counter(map(len, one)), Counter(map(len, other))


def homogeneity(one: Counter[Any], other: Counter[Any]) -> float | None:
    """The p-value of "both counts come from one law" (chi-square, rare values pooled); None where all are one value."""
    total = one + other
    share = min(one.total(), other.total()) / total.total()
    columns = [(one[value], other[value]) for value, count in total.items() if count * share >= LEAST]
    rest = one.total() - sum(count for count, _ in columns), other.total() - sum(count for _, count in columns)
    if sum(rest) * share >= LEAST:
        columns.append(rest)
    if len(columns) < 2:
        return None
    return float(ready().chi2_contingency([*zip(*columns, strict=True)], correction=False).pvalue)


class TokenSample:
    """Drawn tokens against the distributions they should have been drawn from, a piece at a time.

    Counted: log-probabilities, how often the best token was drawn, and halves of the vocabulary; tokens that cannot have been
    drawn are a fault in themselves. rare: share of those that rounding explains.
    """

    def __init__(self, rare: float = RARE, seed: int = 0) -> None:
        self.rare, self.seed = rare, seed
        self.tokens = self.impossible = 0
        self.surplus: defaultdict[str, float] = defaultdict(float)
        self.variance: defaultdict[str, float] = defaultdict(float)

    def add(self, p: Tensor, tokens: Tensor) -> None:
        """p: [N, V], the distribution of each token; tokens: [N] int64. Rows come from independent texts or follow one another
        in one."""
        p = p.double()
        drawn = p.gather(1, tokens[:, None]).squeeze(1)
        self.tokens += len(tokens)
        self.impossible += int((drawn == 0).sum())
        log_p = p.clamp_min(LEAST_P).log()
        best, where = p.max(1)
        self._count("log-probabilities", drawn.clamp_min(LEAST_P).log(), (p * log_p).sum(1), (p * log_p**2).sum(1))
        self._count("the best token", (tokens == where).double(), best, best)
        halves = _halves(p.shape[1], self.seed).to(p)
        expected = p @ halves
        for index in range(BITS + SIGNS):
            self._count(f"half {index} of the vocabulary", halves[tokens, index], expected[:, index], torch.ones_like(best))

    def _count(self, name: str, value: Tensor, mean: Tensor, square: Tensor) -> None:
        self.surplus[name] += float((value - mean).sum())
        self.variance[name] += float((square - mean**2).clamp_min(0).sum())

    def law(self) -> DistributionVerdict:
        """The verdict on all that was added."""
        if self.impossible > max(2, self.rare * self.tokens):
            return DistributionVerdict(0.0, f"{self.impossible} of {self.tokens} tokens have probability 0", 1)
        found = []
        for name, variance in self.variance.items():
            if variance > LEAST:
                z = self.surplus[name] / variance**0.5
                found.append((math.erfc(abs(z) / 2**0.5), f"{name}, z = {z:.1f}"))
        return _smallest(found)


def _halves(size: int, seed: int) -> Tensor:
    """[V, BITS + SIGNS] float64 of 1 and -1."""
    ids = torch.arange(size, dtype=torch.int64, device="cpu")[:, None]
    bits = (ids >> torch.arange(BITS, dtype=torch.int64, device="cpu")) & 1
    drawn = torch.randint(0, 2, (size, SIGNS), generator=torch.Generator().manual_seed(seed), dtype=torch.int64, device="cpu")
    return torch.cat([bits, drawn], 1).double() * 2 - 1
