"""The Bayesian optimiser of the released codes of SWIFT and of Draft & Verify: the package bayesian-optimization."""

from typing import Any

from skipstone.utils.extras import installed

NOISE = 1e-2  # variance of an observation, as a share of the variance of all; in both released codes


def expect_package() -> Any:
    """The package. ImportError if it is not installed."""
    return installed("bayes_opt", "Bayesian optimisation of layer sets needs bayesian-optimization", "search")


def new_optimizer(size: int, kappa: float, seed: int) -> Any:
    """A Gaussian process over points in [0, 1]^size with the keys x0, x1, ... It suggests the point with the highest upper
    confidence bound. kappa: standard deviations that the bound adds to the mean. ImportError as in `expect_package`."""
    package = expect_package()
    optimizer = package.BayesianOptimization(
        f=None,
        pbounds={f"x{place}": (0.0, 1.0) for place in range(size)},
        acquisition_function=package.acquisition.UpperConfidenceBound(kappa=kappa),
        random_state=seed,
        verbose=0,
        allow_duplicate_points=True,
    )
    optimizer.set_gp_params(alpha=NOISE)
    return optimizer
