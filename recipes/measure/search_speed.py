"""Times of a proposal and an observation of SWIFT's default search at 160 sublayers (82 layers).

python recipes/measure/search_speed.py
"""

import time
from statistics import median

import numpy as np

from skipstone.methods.drafting.layer_sets import LayerSetSpace, SearchObjective, SkipCosts
from skipstone.methods.swift.layer_set_search import LinearThompson


def main() -> None:
    space, dice = LayerSetSpace(82), np.random.default_rng(0)
    costs = SkipCosts(0.004, 0.008, tuple(1 + 0.02 * extra for extra in range(30)))
    search = LinearThompson(space, space.count(0.45), SearchObjective(costs), 0)
    proposals, observations = [], []
    for _ in range(500):
        started = time.perf_counter()
        z = search.propose()
        proposed = time.perf_counter()
        search.observe(z, float(dice.uniform(0.5, 0.9)), 32)
        proposals.append(proposed - started)
        observations.append(time.perf_counter() - proposed)
    print("| at 160 sublayers | ms, median of 500 |\n| --- | --- |")
    print(f"| proposal | {1000 * median(proposals):.2f} |\n| observation | {1000 * median(observations):.2f} |")


if __name__ == "__main__":
    main()
