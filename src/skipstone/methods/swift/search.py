"""Searches for the sublayers that a draft model may leave out, pure and seeded.

A search is told the matchness of the sets that it proposes: the share of tokens that the remaining model chooses as the whole
one does (SWIFT, arXiv 2410.06916, Eq. 4). The worth of a set is its matchness, or the speed-up that this and the costs allow
(`SearchObjective`). A search keeps the number of skipped sublayers, but for `resize`.
"""

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from skipstone.methods.drafting.layer_sets import LayerMask, LayerSetSpace, SearchObjective


@dataclass
class LayerSetSearch:
    """No search, and the base of all others: sets of `count` sublayers. seed: of all draws. first: the set to begin with, which
    this one keeps; None is the uniform one. interval: proposals, of which SwiftSearch makes one by Bayesian optimisation.

    adaptive: it learns.
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
        """Forget everything that was observed."""

    def propose(self) -> LayerMask:
        """The next set to try."""
        raise NotImplementedError

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        """Take over the matchness of a set over so many positions."""
        self.observations += 1

    def best(self) -> LayerMask:
        """The set to draft with."""
        return self.space.uniform(self.count) if self.first is None else self.first

    def estimate(self, skipped: LayerMask) -> float | None:
        """What is known of a set's matchness; None where nothing is."""
        return None

    def resize(self, count: int) -> None:
        """Go on with sets of another size."""
        self.count = count
        self.forget()


class RandomSearch(LayerSetSearch):
    """Random sets; every fourth proposal looks again at the set that may be the best, so that luck is found out."""

    adaptive: ClassVar[bool] = True
    AGAIN: ClassVar[int] = 4  # proposals, one of which is of a set that was seen

    def forget(self) -> None:
        self.seen: dict[bytes, tuple[LayerMask, float, int]] = {}  # (set, positions that matched, positions)

    def propose(self) -> LayerMask:
        if not self.seen:
            return super().best()
        if self.observations % self.AGAIN == self.AGAIN - 1:
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
        """The set whose worth is best one standard error above (+1) or below (-1) its mean."""
        sets, matched, total = zip(*self.seen.values(), strict=True)
        mean = np.array(matched) / np.array(total)  # [a]
        drafts = np.array([self.objective.costs.draft(skipped) for skipped in sets])
        return sets[int(np.argmax(self.objective.of_many(mean + sign * _error(mean, np.array(total)), drafts)))]


class SwiftSearch(RandomSearch):
    """The paper's (Eq. 2): random sets, and in every `interval`-th step (beta) the upper confidence bound of a Gaussian process
    over what was seen. The set with the highest score so far drafts (section 4.1.2): none is measured again on purpose.

    Bound and noise are those of the released code.
    """

    KAPPA: ClassVar[float] = 2.5  # standard deviations of the upper confidence bound
    NOISE: ClassVar[float] = 1e-2  # variance of an observation, in variances of all
    POINTS: ClassVar[int] = 200  # latest sets that the Gaussian process knows
    CANDIDATES: ClassVar[int] = 256  # sets that the bound is taken of

    def propose(self) -> LayerMask:
        if not self.seen:
            return LayerSetSearch.best(self)
        if self.observations % self.interval == self.interval - 1 and len(self.seen) > 2:
            return self._by_gaussian_process()
        return self.space.random(self.count, self.rng)

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        """Of a set that was measured before the higher score counts."""
        LayerSetSearch.observe(self, skipped, matchness, positions)
        known = self.estimate(skipped) or 0.0
        self.seen[skipped.tobytes()] = (skipped, max(known, matchness) * positions, positions)

    def best(self) -> LayerMask:
        if not self.seen:
            return super().best()
        return max(self.seen.values(), key=lambda one: self.objective(one[1] / one[2], one[0]))[0]

    def _by_gaussian_process(self) -> LayerMask:
        """Among random sets and neighbours of the best one."""
        seen = list(self.seen.values())[-self.POINTS :]
        known = np.stack([skipped for skipped, _, _ in seen]).astype(float)  # [a, n]
        values = np.array([self.objective(matched / total, skipped) for skipped, matched, total in seen])
        best, rng = self.best(), self.rng
        candidates = [
            self._neighbour(best) if number % 2 else self.space.random(self.count, rng) for number in range(self.CANDIDATES)
        ]
        asked = np.stack(candidates).astype(float)  # [b, n]
        scale = values.std() or 1.0
        inverse = np.linalg.inv(self._kernel(known, known) + self.NOISE * np.eye(len(known)))
        cross = self._kernel(asked, known)  # [b, a]
        mean = cross @ inverse @ ((values - values.mean()) / scale)
        variance = np.maximum(1 - np.einsum("ij,jk,ik->i", cross, inverse, cross), 0)
        return candidates[int(np.argmax(mean + self.KAPPA * np.sqrt(variance)))]

    def _kernel(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        """exp(-h / l), h the number of sublayers that differ, l an eighth of all. a: [i, n], b: [j, n]. Returns [i, j]."""
        differ = a.sum(1)[:, None] + b.sum(1)[None] - 2 * a @ b.T
        return np.exp(-differ / (self.space.size / 8))

    def _neighbour(self, skipped: LayerMask) -> LayerMask:
        """One sublayer exchanged for another."""
        near = skipped.copy()
        near[self.rng.choice(np.flatnonzero(skipped))] = False
        near[self.rng.choice(np.flatnonzero(~skipped))] = True
        return near


class LinearThompson(LayerSetSearch):
    """Thompson sampling on a Bayesian linear model: every skipped sublayer takes something from matchness.

    The best set of a draw follows from sorting, for only the number of attentions among the skipped sublayers decides what a
    set costs (but for layers left out whole). The posterior is kept as its mean and a square root of its covariance; both are
    updated in O(n^2) (Potter's square-root filter).
    """

    adaptive: ClassVar[bool] = True
    FORGET: ClassVar[float] = 0.998  # weight that an observation keeps when the next one comes
    LOSS: ClassVar[float] = 0.5  # matchness that all skipped sublayers together are thought to take at first
    LEVEL: ClassVar[float] = 0.3  # prior standard deviation of the matchness of all sets
    SPREAD: ClassVar[float] = 0.15  # prior standard deviation of what one set takes more or less than another

    def forget(self) -> None:
        size = self.space.size + 1  # the last entry is the matchness where nothing is skipped
        self.mean = np.full(size, -self.LOSS / self.count)
        self.mean[-1] = 1.0
        self.root = np.diag(np.append(np.full(size - 1, self.SPREAD / math.sqrt(self.count)), self.LEVEL))
        self._widest = float(np.abs(self.root).max())

    def estimate(self, skipped: LayerMask) -> float | None:
        return float(np.clip(np.append(skipped, 1.0) @ self.mean, 0, 1)) if self.observations else None

    def resize(self, count: int) -> None:
        self.count = count  # what every sublayer takes stays

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
        self.root *= np.minimum(1, self._widest / np.maximum(rows, 1e-12))[:, None]  # never wider than the level was
        seen = self.root.T @ x
        gain = 1 / (seen @ seen + noise)
        direction = self.root @ seen
        self.mean = self.mean + direction * (gain * (matchness - x @ self.mean))
        self.root -= np.outer(direction, seen) * (gain / (1 + math.sqrt(gain * noise)))

    def _argmax(self, weights: NDArray[np.float64], count: int) -> tuple[LayerMask, float]:
        """The best set of a linear model [n + 1], and its worth. For every split between attentions and MLPs it has those that
        cost least matchness, and the two are taken to fall on the same layers by chance."""
        middle = self.space.size // 2
        halves = (weights[:middle], weights[middle:-1])
        order = [np.argsort(-half, kind="stable") for half in halves]
        sums = [np.append(0, np.cumsum(half[by])) for half, by in zip(halves, order, strict=True)]
        attentions = np.arange(max(0, count - middle), min(count, middle) + 1)  # [a], one for every split
        mlps = count - attentions
        matchness = weights[-1] + sums[0][attentions] + sums[1][mlps]
        worths = self.objective.of_many(matchness, self.objective.costs.drafts(attentions, mlps, attentions * mlps / middle))
        best = int(np.argmax(worths))
        skipped = np.zeros(self.space.size, dtype=bool)
        skipped[order[0][: attentions[best]]] = True
        skipped[middle + order[1][: mlps[best]]] = True
        return skipped, float(worths[best])


SearchName = Literal["linear_ts", "swift", "random", "uniform"]
SEARCHES: dict[SearchName, type[LayerSetSearch]] = {
    "linear_ts": LinearThompson,
    "swift": SwiftSearch,
    "random": RandomSearch,
    "uniform": LayerSetSearch,
}


def _error(mean: Any, total: Any) -> Any:
    """Standard error of a share over `total` positions, never quite 0."""
    return np.sqrt(np.maximum(mean * (1 - mean), 1 / (4 * total)) / total)
