"""Searches for the sublayers that a draft model may leave out, pure and seeded.

A set's worth is the share of tokens that the remaining model chooses as the whole one does (matchness, SWIFT, arXiv 2410.06916,
Eq. 4), or the speed-up that this share and the measured costs allow. A search keeps the number of skipped sublayers, but for
`resize`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from skipstone.methods.shared.layer_sets import Objective, Space, Z


@dataclass
class Search:
    """A search over sets of `count` sublayers: propose, observe, best. seed: of all its draws."""

    space: Space
    count: int
    objective: Objective = field(default_factory=Objective)
    seed: int = 0
    name: ClassVar[str]
    adaptive: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.count < self.space.size:
            raise ValueError(f"a layer set skips 1 to {self.space.size - 1} sublayers of this model, found {self.count}")
        self.rng = np.random.default_rng(self.seed)
        self.steps = 0
        self.start()

    def start(self) -> None:
        """Forget everything that was observed."""

    def propose(self) -> Z:
        """The next set to try."""
        raise NotImplementedError

    def observe(self, z: Z, matchness: float, positions: int) -> None:
        """Take over what was seen of a set at so many positions."""
        self.steps += 1

    def best(self) -> Z:
        """The set to draft with."""
        raise NotImplementedError

    def estimate(self, z: Z) -> float | None:
        """What is known of a set's matchness; None where nothing is."""
        return None

    def least(self, z: Z) -> float:
        """Of a set's matchness, what is nearly certain: two standard errors below the estimate; 0 where nothing is known."""
        return 0.0

    def likely(self, z: Z) -> float:
        """One standard error below the estimate: what a set that was never tried itself may be hoped to have."""
        seen = self.estimate(z)
        return 0.0 if seen is None else (seen + self.least(z)) / 2

    def promise(self, count: int) -> float:
        """What the best set of so many sublayers is expected to be worth; 0 where nothing is known of such."""
        return 0.0

    def resize(self, count: int) -> None:
        """Go on with sets of another size."""
        self.count = count
        self.start()

    def widen(self) -> None:
        """The task has changed: what was learnt counts for little."""
        self.start()


class FixedSearch(Search):
    """A set that was found before."""

    name: ClassVar[str] = "fixed"
    adaptive: ClassVar[bool] = False

    def __init__(self, space: Space, z: Z) -> None:
        self.z = z
        super().__init__(space, int(z.sum()))

    def best(self) -> Z:
        return self.z


class UniformSearch(Search):
    """No search: the uniform set (the ablation "no optimisation")."""

    name: ClassVar[str] = "uniform"
    adaptive: ClassVar[bool] = False

    def best(self) -> Z:
        return self.space.uniform(self.count)


class RandomSearch(Search):
    """Random sets; every fourth proposal looks again at the set that may be the best, so that luck is found out."""

    name: ClassVar[str] = "random"
    AGAIN: ClassVar[int] = 4

    def start(self) -> None:
        self.seen: dict[bytes, tuple[Z, float, int]] = {}

    def propose(self) -> Z:
        if not self.seen:
            return self.space.uniform(self.count)
        if self.steps % self.AGAIN == self.AGAIN - 1:
            return self._extreme(+1)
        return self._fresh()

    def _fresh(self) -> Z:
        return self.space.random(self.count, self.rng)

    def observe(self, z: Z, matchness: float, positions: int) -> None:
        super().observe(z, matchness, positions)
        _, matched, total = self.seen.get(z.tobytes(), (z, 0.0, 0))
        self.seen[z.tobytes()] = (z, matched + matchness * positions, total + positions)

    def widen(self) -> None:
        best = self.best()
        known = self.seen.get(best.tobytes())
        self.start()
        if known is not None:
            _, matched, total = known
            self.seen[best.tobytes()] = (best, matched / total, 1)

    def best(self) -> Z:
        return self._extreme(-1) if self.seen else self.space.uniform(self.count)

    def estimate(self, z: Z) -> float | None:
        _, matched, total = self.seen.get(z.tobytes(), (z, 0.0, 0))
        return matched / total if total else None

    def least(self, z: Z) -> float:
        _, matched, total = self.seen.get(z.tobytes(), (z, 0.0, 0))
        return matched / total - 2 * _error(matched / total, total) if total else 0.0

    def _extreme(self, sign: int) -> Z:
        """The set whose worth is best one standard error above (+1) or below (-1) its mean."""
        entries = list(self.seen.values())
        matched, total = np.array([one[1] for one in entries]), np.array([one[2] for one in entries])
        mean = matched / total
        drafts = np.array([self.objective.costs.draft(z) for z, _, _ in entries])
        return entries[int(np.argmax(self.objective.of_many(mean + sign * _error(mean, total), drafts)))][0]


class SwiftSearch(RandomSearch):
    """The paper's: random sets, every `interval`-th by the upper confidence bound of a Gaussian process over what was seen
    (section 4.1; kappa and noise of the released code). The best is by mean and error here, the code keeps the luckiest."""

    name: ClassVar[str] = "swift"
    INTERVAL: ClassVar[int] = 25
    KAPPA, NOISE, POINTS, CANDIDATES = 2.5, 1e-2, 200, 256

    def propose(self) -> Z:
        if self.steps % self.INTERVAL == self.INTERVAL - 1 and len(self.seen) > 2:
            return self._by_gaussian_process()
        return super().propose()

    def _by_gaussian_process(self) -> Z:
        """Among random sets and neighbours of the best one."""
        seen = list(self.seen.values())[-self.POINTS :]
        known = np.stack([z for z, _, _ in seen]).astype(float)
        values = np.array([self.objective(matched / total, z) for z, matched, total in seen])
        best = self.best()
        candidates = [self._neighbour(best) if i % 2 else self._fresh() for i in range(self.CANDIDATES)]
        asked = np.stack(candidates).astype(float)
        scale = values.std() or 1.0
        inverse = np.linalg.inv(self._kernel(known, known) + self.NOISE * np.eye(len(known)))
        cross = self._kernel(asked, known)
        mean = cross @ inverse @ ((values - values.mean()) / scale)
        variance = np.maximum(1 - np.einsum("ij,jk,ik->i", cross, inverse, cross), 0)
        return candidates[int(np.argmax(mean + self.KAPPA * np.sqrt(variance)))]

    def _kernel(self, a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
        """exp(-h / l), h the number of sublayers that differ, l an eighth of all."""
        differ = a.sum(1)[:, None] + b.sum(1)[None] - 2 * a @ b.T
        return np.exp(-differ / (self.space.size / 8))

    def _neighbour(self, z: Z) -> Z:
        """One sublayer exchanged for another."""
        near = z.copy()
        near[self.rng.choice(np.flatnonzero(z))] = False
        near[self.rng.choice(np.flatnonzero(~z))] = True
        return near


class LinearThompson(Search):
    """Thompson sampling on a Bayesian linear model of matchness over the skip indicator; the best set of a draw follows from
    sorting, for only the number of attentions among the skipped decides what a set costs, but for layers left out whole.

    The posterior is kept as mean and square root of the covariance, both updated in O(n^2) (Potter's square-root filter).
    FORGET: what an observation keeps of its weight when the next one comes.
    """

    name: ClassVar[str] = "linear_ts"
    FORGET: ClassVar[float] = 0.998
    LOSS, LEVEL, SPREAD = 0.5, 0.3, 0.15
    """What all skipped sublayers together are thought to take from matchness at first, and its prior standard deviations: of
    the level, and of what one set takes more or less than another."""

    def start(self) -> None:
        size = self.space.size + 1  # the last entry is what is left when nothing is skipped
        self.mean = np.full(size, -self.LOSS / self.count)
        self.mean[-1] = 1.0
        self.root = np.diag(np.append(np.full(size - 1, self.SPREAD / math.sqrt(self.count)), self.LEVEL))
        self._widest = float(np.abs(self.root).max())

    def estimate(self, z: Z) -> float | None:
        return float(np.clip(np.append(z, 1.0) @ self.mean, 0, 1)) if self.steps else None

    def least(self, z: Z) -> float:
        x = np.append(z, 1.0)
        return float(x @ self.mean - 2 * np.linalg.norm(self.root.T @ x)) if self.steps else 0.0

    def resize(self, count: int) -> None:
        self.count = count  # what every sublayer is worth stays

    def widen(self) -> None:
        """The mean stays, its certainty goes."""
        mean = self.mean
        self.start()
        self.mean = mean

    def propose(self) -> Z:
        if not self.steps:
            return self.space.uniform(self.count)
        return self._argmax(self.mean + self.root @ self.rng.standard_normal(len(self.mean)), self.count)[0]

    def best(self) -> Z:
        return self._argmax(self.mean, self.count)[0] if self.steps else self.space.uniform(self.count)

    def promise(self, count: int) -> float:
        return self._argmax(self.mean, count)[1] if self.steps else 0.0

    def observe(self, z: Z, matchness: float, positions: int) -> None:
        super().observe(z, matchness, positions)
        x = np.append(z, 1.0)
        noise = max(matchness * (1 - matchness), 0.02) / positions
        self.root /= math.sqrt(self.FORGET)
        rows = np.sqrt((self.root**2).sum(1))
        self.root *= np.minimum(1, self._widest / np.maximum(rows, 1e-12))[:, None]  # never wider than the level was
        seen = self.root.T @ x
        gain = 1 / (seen @ seen + noise)
        direction = self.root @ seen
        self.mean = self.mean + direction * (gain * (matchness - x @ self.mean))
        self.root -= np.outer(direction, seen) * (gain / (1 + math.sqrt(gain * noise)))

    def _argmax(self, weights: NDArray[np.float64], count: int) -> tuple[Z, float]:
        """The best set of a linear model, and its worth: for every split between attentions and MLPs the ones that cost least
        matchness, as if the two overlapped by chance."""
        middle = self.space.size // 2
        halves = (weights[:middle], weights[middle:-1])
        order = [np.argsort(-half, kind="stable") for half in halves]
        sums = [np.append(0, np.cumsum(half[by])) for half, by in zip(halves, order, strict=True)]
        attentions = np.arange(max(0, count - middle), min(count, middle) + 1)
        matchness = weights[-1] + sums[0][attentions] + sums[1][count - attentions]
        mlps = count - attentions
        worths = self.objective.of_many(matchness, self.objective.costs.drafts(attentions, mlps, attentions * mlps / middle))
        best = int(np.argmax(worths))
        z = np.zeros(self.space.size, dtype=bool)
        z[order[0][: attentions[best]]] = True
        z[middle + order[1][: mlps[best]]] = True
        return z, float(worths[best])


SEARCHES: dict[str, type[Search]] = {kind.name: kind for kind in (LinearThompson, SwiftSearch, RandomSearch, UniformSearch)}


def _error(mean: Any, total: Any) -> Any:
    """Standard error of a share over `total` positions, never quite 0."""
    return np.sqrt(np.maximum(mean * (1 - mean), 1 / (4 * total)) / total)
