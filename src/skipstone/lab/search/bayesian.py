"""Draft & Verify's proposals of layer sets (arXiv 2309.08168, section 3.2): Bayesian optimisation over one number in [0, 1] per
sublayer, with the package bayesian-optimization.

The paper does not state the constants. They are those of its released code and of the version of the package that it used:
a Matern kernel (nu = 2.5), an upper confidence bound, and one random point to begin with. Deviations: the first and the last
layer always run here; a point that is proposed again counts with its mean.
"""

from collections.abc import Sequence

import numpy as np

from skipstone.methods.drafting.layer_sets import LayerMask
from skipstone.utils.extras import installed

SKIP_ABOVE = 0.5  # a sublayer is skipped if its number is larger
KAPPA = 2.576  # standard deviations that the acquisition function adds to the mean
NOISE = 1e-2  # variance of one measurement, as a share of the variance of all


class BayesianProposer:
    """Proposes points [size] in [0, 1] that are expected to be fast, or uncertain. A proposal depends on the observations and
    the seed only. ImportError without bayesian-optimization."""

    def __init__(self, size: int, seed: int) -> None:
        self.package = installed("bayes_opt", "a Bayesian search needs bayesian-optimization", "search")
        self.names, self.seed = [f"x{place}" for place in range(size)], seed
        self.targets: dict[tuple[float, ...], list[float]] = {}

    def observe(self, point: Sequence[float], target: float) -> None:
        """Add a measurement, where more is better."""
        self.targets.setdefault(tuple(point), []).append(target)

    def propose(self) -> list[float]:
        """The point with the highest upper confidence bound, a random one before the first observation."""
        acquisition = self.package.acquisition.UpperConfidenceBound(kappa=KAPPA)
        seed = self.seed + sum(map(len, self.targets.values()))
        bounds = dict.fromkeys(self.names, (0.0, 1.0))
        optimiser = self.package.BayesianOptimization(None, bounds, acquisition, random_state=seed, verbose=0)
        optimiser.set_gp_params(alpha=NOISE)
        for point, targets in self.targets.items():
            optimiser.register(dict(zip(self.names, point, strict=True)), float(np.mean(targets)))
        proposal = optimiser.suggest()
        return [float(proposal[name]) for name in self.names]


def skipped_sublayers(point: Sequence[float]) -> LayerMask:
    """The sublayers [size] whose number is above SKIP_ABOVE. If these are none or all, the number nearest to it changes sides:
    drafting needs a sublayer to skip and one to run."""
    numbers = np.array(point)
    skipped = numbers > SKIP_ABOVE
    if skipped.all() or not skipped.any():
        skipped[np.abs(numbers - SKIP_ABOVE).argmin()] ^= True
    return skipped
