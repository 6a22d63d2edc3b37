"""Seeded searches for the best sublayers to skip in drafting.

A search proposes sets and observes their matchness, the share of tokens that the reduced model predicts like the whole one
(SWIFT, arXiv 2410.06916, Eq. 4). `SearchObjective` defines the value of a set: its matchness or its expected speed-up. Only
`resize` changes the number of skipped sublayers.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from skipstone.methods.drafting.layer_sets import LayerMask, LayerSetSpace, SearchObjective


@dataclass
class LayerSetSearch:
    """Base class of searches for sets of `count` sublayers. By itself it searches nothing and uses the first set.

    first: the first set, None for the uniform one. interval: SwiftSearch makes one of so many proposals by Bayesian
    optimisation. adaptive: whether it learns.
    """

    space: LayerSetSpace
    count: int
    objective: SearchObjective = field(default_factory=SearchObjective)
    seed: int = 0
    first: LayerMask | None = None
    interval: int = 25
    adaptive: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not 0 < self.count < self.space.size:
            raise ValueError(f"a layer set skips 1 to {self.space.size - 1} sublayers of this model, found {self.count}")
        self.rng = np.random.default_rng(self.seed)
        self.observations = 0
        self.forget()

    def forget(self) -> None:
        """Forget all observations."""

    def propose(self) -> LayerMask:
        """The next set to evaluate."""
        raise NotImplementedError

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        """Record a set's matchness over a number of positions."""
        self.observations += 1

    def best(self) -> LayerMask:
        """The set to draft with."""
        return self.space.uniform(self.count) if self.first is None else self.first

    def estimate(self, skipped: LayerMask) -> float | None:
        """The estimated matchness of a set; None without observations."""
        return None

    def resize(self, count: int) -> None:
        """Search sets of another size from now on."""
        self.count = count
        self.forget()


class RandomSearch(LayerSetSearch):
    """Random sets. Every fourth proposal evaluates the most promising set again, to reject sets that were only lucky."""

    adaptive: ClassVar[bool] = True
    REPEAT_INTERVAL: ClassVar[int] = 4  # one of so many proposals repeats a set

    def forget(self) -> None:
        self.seen: dict[bytes, tuple[LayerMask, float, int]] = {}  # (set, positions that matched, positions)

    def propose(self) -> LayerMask:
        if not self.seen:
            return super().best()
        if self.observations % self.REPEAT_INTERVAL == self.REPEAT_INTERVAL - 1:
            return self._extreme(+1)
        return self.space.random(self.count, self.rng)

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        super().observe(skipped, matchness, positions)
        matched, total = self._counts(skipped)
        self.seen[skipped.tobytes()] = (skipped, matched + matchness * positions, total + positions)

    def best(self) -> LayerMask:
        return self._extreme(-1) if self.seen else super().best()

    def estimate(self, skipped: LayerMask) -> float | None:
        matched, total = self._counts(skipped)
        return matched / total if total else None

    def _counts(self, skipped: LayerMask) -> tuple[float, int]:
        return self.seen.get(skipped.tobytes(), (skipped, 0.0, 0))[1:]

    def _extreme(self, sign: int) -> LayerMask:
        """The set with the best upper (+1) or lower (-1) bound of its value, one standard error from the mean."""
        sets, matched, total = zip(*self.seen.values(), strict=True)
        mean = np.array(matched) / np.array(total)  # [a]
        drafts = np.array([self.objective.costs.draft(skipped) for skipped in sets])
        return sets[int(np.argmax(self.objective.of_many(mean + sign * _error(mean, np.array(total)), drafts)))]


class SwiftSearch(RandomSearch):
    """The paper's search (Eq. 2): random sets, and in every `interval`-th step (beta) Bayesian optimisation.

    That maximises the upper confidence bound of a Gaussian process. The set with the highest observed value drafts (section
    4.1.2); no set is evaluated again on purpose. Bound and noise are those of the released code.
    """

    KAPPA: ClassVar[float] = 2.5  # upper confidence bound, in standard deviations
    NOISE: ClassVar[float] = 1e-2  # variance of an observation, relative to the variance of all
    POINTS: ClassVar[int] = 200  # number of latest sets in the Gaussian process
    CANDIDATES: ClassVar[int] = 256  # number of sets to compare by the bound

    def propose(self) -> LayerMask:
        if not self.seen:
            return LayerSetSearch.best(self)
        if self.observations % self.interval == self.interval - 1 and len(self.seen) > 2:
            return self._by_gaussian_process()
        return self.space.random(self.count, self.rng)

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        """As in `LayerSetSearch`. The highest matchness of a set counts."""
        LayerSetSearch.observe(self, skipped, matchness, positions)
        known = self.estimate(skipped) or 0.0
        self.seen[skipped.tobytes()] = (skipped, max(known, matchness) * positions, positions)

    def best(self) -> LayerMask:
        if not self.seen:
            return super().best()
        return max(self.seen.values(), key=lambda seen: self.objective(seen[1] / seen[2], seen[0]))[0]

    def _by_gaussian_process(self) -> LayerMask:
        """The set with the highest bound among random sets and neighbours of the best one."""
        seen = list(self.seen.values())[-self.POINTS :]
        known = np.stack([skipped for skipped, _, _ in seen]).astype(float)  # [a, n]
        values = np.array([self.objective(matched / total, skipped) for skipped, matched, total in seen])
        best, rng = self.best(), self.rng
        candidates = [
            self._neighbour(best) if number % 2 else self.space.random(self.count, rng) for number in range(self.CANDIDATES)
        ]
        queries = np.stack(candidates).astype(float)  # [b, n]
        scale = values.std() or 1.0
        inverse = np.linalg.inv(self._kernel(known, known) + self.NOISE * np.eye(len(known)))
        cross = self._kernel(queries, known)  # [b, a]
        mean = cross @ inverse @ ((values - values.mean()) / scale)
        variance = np.maximum(1 - np.einsum("ij,jk,ik->i", cross, inverse, cross), 0)
        return candidates[int(np.argmax(mean + self.KAPPA * np.sqrt(variance)))]

    def _kernel(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        """exp(-h / l): h is the number of different sublayers, l = n / 8. a: [i, n], b: [j, n]. Returns [i, j]."""
        differ = a.sum(1)[:, None] + b.sum(1)[None] - 2 * a @ b.T
        return np.exp(-differ / (self.space.size / 8))

    def _neighbour(self, skipped: LayerMask) -> LayerMask:
        """A set with one sublayer exchanged for another."""
        neighbour = skipped.copy()
        neighbour[self.rng.choice(np.flatnonzero(skipped))] = False
        neighbour[self.rng.choice(np.flatnonzero(~skipped))] = True
        return neighbour


class LinearThompson(LayerSetSearch):
    """Thompson sampling on a Bayesian linear model: every skipped sublayer reduces matchness by its own amount.

    A set's cost depends almost only on its number of attentions, so sorting finds the best set of a draw. The posterior is a
    mean and a square root of the covariance, both updated in O(n^2) (Potter's square-root filter).
    """

    adaptive: ClassVar[bool] = True
    FORGET: ClassVar[float] = 0.998  # factor on an observation's weight with every later observation
    LOSS: ClassVar[float] = 0.5  # prior mean of the matchness lost by all skipped sublayers together
    LEVEL: ClassVar[float] = 0.3  # prior standard deviation of the matchness that all sets share
    SPREAD: ClassVar[float] = 0.15  # prior standard deviation of the loss between sets

    def forget(self) -> None:
        size = self.space.size + 1  # the last entry is the matchness without skipped sublayers
        self.mean = np.full(size, -self.LOSS / self.count)
        self.mean[-1] = 1.0
        self.root = np.diag(np.append(np.full(size - 1, self.SPREAD / math.sqrt(self.count)), self.LEVEL))
        self._widest = float(np.abs(self.root).max())

    def estimate(self, skipped: LayerMask) -> float | None:
        return float(np.clip(np.append(skipped, 1.0) @ self.mean, 0, 1)) if self.observations else None

    def resize(self, count: int) -> None:
        self.count = count  # the losses of single sublayers stay valid

    def propose(self) -> LayerMask:
        if not self.observations:
            return super().best()
        return self._argmax(self.mean + self.root @ self.rng.standard_normal(len(self.mean)), self.count)[0]

    def best(self) -> LayerMask:
        return self._argmax(self.mean, self.count)[0] if self.observations else super().best()

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        super().observe(skipped, matchness, positions)
        x = np.append(skipped, 1.0)  # [n + 1]
        noise = max(matchness * (1 - matchness), 0.02) / positions
        self.root /= math.sqrt(self.FORGET)
        rows = np.sqrt((self.root**2).sum(1))
        self.root *= np.minimum(1, self._widest / np.maximum(rows, 1e-12))[:, None]  # at most the prior's largest deviation
        projected = self.root.T @ x
        gain = 1 / (projected @ projected + noise)
        direction = self.root @ projected
        self.mean = self.mean + direction * (gain * (matchness - x @ self.mean))
        self.root -= np.outer(direction, projected) * (gain / (1 + math.sqrt(gain * noise)))

    def _argmax(self, weights: NDArray[np.float64], count: int) -> tuple[LayerMask, float]:
        """The best set of a linear model [n + 1], and its value.

        For every split between attentions and MLPs it compares the set that loses least matchness. The number of layers with
        both skipped is taken as that of independent choices."""
        middle = self.space.size // 2
        halves = (weights[:middle], weights[middle:-1])
        order = [np.argsort(-half, kind="stable") for half in halves]
        sums = [np.append(0, np.cumsum(half[by])) for half, by in zip(halves, order, strict=True)]
        attentions = np.arange(max(0, count - middle), min(count, middle) + 1)  # [a], one for every split
        mlps = count - attentions
        matchness = weights[-1] + sums[0][attentions] + sums[1][mlps]
        values = self.objective.of_many(matchness, self.objective.costs.drafts(attentions, mlps, attentions * mlps / middle))
        best = int(np.argmax(values))
        skipped = np.zeros(self.space.size, dtype=bool)
        skipped[order[0][: attentions[best]]] = True
        skipped[middle + order[1][: mlps[best]]] = True
        return skipped, float(values[best])


SearchName = Literal["linear_ts", "swift", "random", "uniform"]
SEARCHES: dict[SearchName, type[LayerSetSearch]] = {
    "linear_ts": LinearThompson,
    "swift": SwiftSearch,
    "random": RandomSearch,
    "uniform": LayerSetSearch,
}


def _error(mean: Any, total: Any) -> Any:
    """Standard error of a share over `total` positions, always positive."""
    return np.sqrt(np.maximum(mean * (1 - mean), 1 / (4 * total)) / total)
