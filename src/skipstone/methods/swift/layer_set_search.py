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

from skipstone.methods.drafting.bayesian_optimizer import NOISE, new_optimizer
from skipstone.methods.drafting.layer_sets import LayerMask, LayerSetSpace, SearchObjective


@dataclass
class LayerSetSearch:
    """Base class of searches for sets of `count` sublayers. By itself it searches nothing and uses the first set.

    first: the first set, None for the uniform one. interval: SwiftSearch makes one of so many proposals by Bayesian
    optimisation. adaptive: whether it learns. window: tokens of a response that evaluate its sets.
    """

    space: LayerSetSpace
    count: int
    objective: SearchObjective = field(default_factory=SearchObjective)
    seed: int = 0
    first: LayerMask | None = None
    interval: int = 25
    adaptive: ClassVar[bool] = False
    window: ClassVar[Literal["latest", "first"]] = "latest"

    def __post_init__(self) -> None:
        if not 0 < self.count < self.space.size:
            raise ValueError(f"a layer set skips 1 to {self.space.size - 1} sublayers of this model, found {self.count}")
        self.rng = np.random.default_rng(self.seed)
        self.observations = 0
        self.forget()

    @staticmethod
    def count_of(space: LayerSetSpace, ratio: float) -> int:
        """Number of sublayers to skip for a skip ratio."""
        return space.count(ratio)

    def forget(self) -> None:
        """Forget all observations."""

    def start(self) -> LayerMask:
        """The set to draft with before any observation."""
        return self.space.uniform(self.count) if self.first is None else self.first

    def propose(self) -> LayerMask:
        """The next set to evaluate."""
        raise NotImplementedError

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        """Record a set's matchness over a number of positions."""
        self.observations += 1

    def best(self) -> LayerMask:
        """The set to draft with."""
        return self.start()

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
            return self.start()
        if self.observations % self.REPEAT_INTERVAL == self.REPEAT_INTERVAL - 1:
            return self._extreme(+1)
        return self.space.random(self.count, self.rng)

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        super().observe(skipped, matchness, positions)
        matched, total = self._counts(skipped)
        self.seen[skipped.tobytes()] = (skipped, matched + matchness * positions, total + positions)

    def best(self) -> LayerMask:
        return self._extreme(-1) if self.seen else self.start()

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
    4.1.2); no set is evaluated again on purpose. Bound and noise are those of the released code. The paper does not print them.
    """

    KAPPA: ClassVar[float] = 2.5  # upper confidence bound, in standard deviations
    POINTS: ClassVar[int] = 200  # number of latest sets in the Gaussian process
    CANDIDATES: ClassVar[int] = 256  # number of sets to compare by the bound
    SCALES: ClassVar[int] = 8  # length scales of the kernel in the number of sublayers

    def forget(self) -> None:
        super().forget()
        self.top: tuple[LayerMask, float] | None = None  # the best set and its value

    def propose(self) -> LayerMask:
        if not self.seen:
            return self.start()
        if self.observations % self.interval == self.interval - 1 and len(self.seen) > 2:
            return self._by_gaussian_process()
        return self.space.random(self.count, self.rng)

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        """As in `LayerSetSearch`. The highest matchness of a set counts."""
        LayerSetSearch.observe(self, skipped, matchness, positions)
        highest = max(self.estimate(skipped) or 0.0, matchness)
        self.seen[skipped.tobytes()] = (skipped, highest * positions, positions)
        value = self.objective(highest, skipped)
        if self.top is None or value > self.top[1]:
            self.top = skipped, value

    def best(self) -> LayerMask:
        return self.start() if self.top is None else self.top[0]

    def _by_gaussian_process(self) -> LayerMask:
        """The set with the highest bound among random sets and neighbours of the best one."""
        seen = list(self.seen.values())[-self.POINTS :]
        known = np.stack([skipped for skipped, _, _ in seen]).astype(float)  # [a, n]
        values = np.array([self.objective(matched / total, skipped) for skipped, matched, total in seen])
        best, rng = self.best(), self.rng
        candidates = [
            self._neighbour(best) if number % 2 else self.space.random(self.count, rng) for number in range(self.CANDIDATES)
        ]
        return candidates[int(np.argmax(self.bounds(known, values, np.stack(candidates).astype(float))))]

    def bounds(self, known: NDArray[Any], values: NDArray[Any], queries: NDArray[Any]) -> NDArray[Any]:
        """Upper confidence bounds [b] of sets `queries` [b, n], from sets `known` [a, n] with values [a]. They are in standard
        deviations of the values from their mean."""
        scale = values.std() or 1.0
        inverse = np.linalg.inv(self._kernel(known, known) + NOISE * np.eye(len(known)))
        cross = self._kernel(queries, known)  # [b, a]
        weights = cross @ inverse
        mean, variance = weights @ ((values - values.mean()) / scale), np.maximum(1 - (weights * cross).sum(1), 0)
        return mean + self.KAPPA * np.sqrt(variance)

    def _kernel(self, a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
        """exp(-h / l): h is the number of different sublayers, l = n / SCALES. a: [i, n], b: [j, n]. Returns [i, j]."""
        differ = a.sum(1)[:, None] + b.sum(1)[None] - 2 * a @ b.T
        return np.exp(-differ / (self.space.size / self.SCALES))

    def _neighbour(self, skipped: LayerMask) -> LayerMask:
        """A set with one sublayer exchanged for another."""
        neighbour = skipped.copy()
        neighbour[self.rng.choice(np.flatnonzero(skipped))] = False
        neighbour[self.rng.choice(np.flatnonzero(~skipped))] = True
        return neighbour


class ReleaseSearch(SwiftSearch):
    """The search of SWIFT's released code, with the library bayesian-optimization that it uses.

    It truncates the number of sublayers, starts from every second layer without evaluating that set, and evaluates sets on the
    first tokens of a response. Bayesian optimisation maximises its bound over [0, 1]^n; the largest coordinates are skipped.
    """

    window: ClassVar[Literal["latest", "first"]] = "first"
    RANDOM_STATE: ClassVar[int] = 1

    @staticmethod
    def count_of(space: LayerSetSpace, ratio: float) -> int:
        return int(space.size * ratio)

    def forget(self) -> None:
        super().forget()
        self.optimizer = new_optimizer(self.space.size, self.KAPPA, self.RANDOM_STATE)
        self.point: list[float] | None = None  # the suggestion that the last proposal was rounded from

    def start(self) -> LayerMask:
        """Every second layer, for any skip ratio."""
        return np.tile(np.arange(self.space.layers - 2) % 2 == 0, 2)

    def propose(self) -> LayerMask:
        self.point = None
        if self.observations % self.interval != self.interval - 1:
            return self.space.random(self.count, self.rng)
        self.point = list(self.optimizer.suggest().values())
        skipped = np.zeros(self.space.size, dtype=bool)
        skipped[np.argsort(-np.array(self.point), kind="stable")[: self.count]] = True
        return skipped

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        super().observe(skipped, matchness, positions)
        self.optimizer.register(self.point or skipped.astype(float).tolist(), matchness)


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


SearchName = Literal["swift", "release", "linear_ts", "random", "uniform"]
SEARCHES: dict[SearchName, type[LayerSetSearch]] = {
    "swift": SwiftSearch,
    "release": ReleaseSearch,
    "linear_ts": LinearThompson,
    "random": RandomSearch,
    "uniform": LayerSetSearch,
}


def _error(mean: Any, total: Any) -> Any:
    """Standard error of a share over `total` positions, always positive."""
    return np.sqrt(np.maximum(mean * (1 - mean), 1 / (4 * total)) / total)
