"""Draft & Verify's proposals of layer sets (arXiv 2309.08168, section 3.2): Bayesian optimisation over one number in [0, 1] per
sublayer, with the package bayesian-optimization.

The paper does not state the constants. They are those of its released code and of the version of the package that it used:
a Matern kernel (nu = 2.5), an upper confidence bound, and one random point to begin with. Deviations: the first and the last
layer always run here; a point that is proposed again counts with its mean.
"""

from collections.abc import Sequence

import numpy as np

from skipstone.methods.drafting.bayesian_optimizer import new_optimizer
from skipstone.methods.drafting.layer_sets import LayerMask

SKIP_ABOVE = 0.5  # a sublayer is skipped if its number is larger
KAPPA = 2.576  # standard deviations that the acquisition function adds to the mean


class BayesianProposer:
    """Proposes points [size] in [0, 1] that are expected to be fast, or uncertain. A proposal depends on the observations and
    the seed only. ImportError without bayesian-optimization."""

    def __init__(self, size: int, seed: int) -> None:
        self.size, self.seed = size, seed
        self.targets: dict[tuple[float, ...], list[float]] = {}

    def observe(self, point: Sequence[float], target: float) -> None:
        """Add a measurement, where more is better."""
        self.targets.setdefault(tuple(point), []).append(target)

    def propose(self) -> list[float]:
        """The point with the highest upper confidence bound, a random one before the first observation."""
        optimizer = new_optimizer(self.size, KAPPA, self.seed + sum(map(len, self.targets.values())))
        for point, targets in self.targets.items():
            optimizer.register(list(point), float(np.mean(targets)))
        return list(map(float, optimizer.suggest().values()))


def skipped_sublayers(point: Sequence[float]) -> LayerMask:
    """A sublayer [size] is skipped if its number is above SKIP_ABOVE. Drafting needs one to skip and one to run. If none or
    all are above, the nearest one changes sides."""
    numbers = np.array(point)
    skipped = numbers > SKIP_ABOVE
    if skipped.all() or not skipped.any():
        skipped[np.abs(numbers - SKIP_ABOVE).argmin()] ^= True
    return skipped
