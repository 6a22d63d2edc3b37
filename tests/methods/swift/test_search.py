"""Searches over layer sets: what a set is, what it is worth, and which search finds a good one."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from skipstone import Swift
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.layer_sets import LayerMask, LayerSetSpace, SearchObjective, SkipCosts, expected_speedup
from skipstone.methods.swift.layer_set_optimisation import LayerSetOptimisation
from skipstone.methods.swift.layer_set_search import SEARCHES, LayerSetSearch, LinearThompson, SwiftSearch
from skipstone.models.passes import SkipSet
from tests.helpers.machine import llama

OURS = [name for name in SEARCHES if name != "release"]  # which needs seconds for a suggestion
COSTS = SkipCosts(0.015, 0.027, tuple(1 + 0.06 * extra for extra in range(30)))


def landscape(seed: int, layers: int = 24) -> Callable[[LayerMask], float]:
    """A synthetic matchness: every sublayer takes its share, some much more than others, and pairs interact."""
    rng = np.random.default_rng(1000 + seed)
    size = 2 * (layers - 2)
    weight = rng.gamma(0.5, 1, size)
    weight *= 1.6 / weight.sum()
    pairs = rng.normal(0, 0.006, (size, size))
    return lambda z: float(np.clip(np.exp(-max(weight[z].sum() + pairs[np.ix_(z, z)].sum() / 2, 0)), 0.02, 0.99))


def searched(name: str, seed: int, steps: int = 300) -> float:
    """What the set is truly worth that a search ends with, after noisy evaluations over 32 positions each."""
    matchness, space, dice = landscape(seed), LayerSetSpace(24), np.random.default_rng(seed)
    search = SEARCHES[name](space, space.count(0.45), SearchObjective(COSTS), seed)
    for _ in range(steps if search.adaptive else 0):
        z = search.propose()
        assert z.sum() == search.count
        search.observe(z, dice.binomial(32, matchness(z)) / 32, 32)
    best = search.best()
    assert best.sum() == search.count
    return float(expected_speedup(matchness(best), COSTS.draft(best), COSTS))


@pytest.mark.product
def test_linear_thompson_is_at_least_as_good_as_the_others_on_20_problems() -> None:
    found = {name: np.array([searched(name, seed) for seed in range(20)]) for name in OURS}
    assert (found["linear_ts"] >= found["random"]).all()
    assert (found["linear_ts"] >= found["uniform"]).all()
    assert found["linear_ts"].mean() > found["swift"].mean() + 0.1 > found["random"].mean()
    assert found["linear_ts"].mean() > 1.25


def test_searches_repeat_with_their_seed() -> None:
    assert all(searched(name, 3, 60) == searched(name, 3, 60) for name in OURS)


def test_a_set_is_sublayers_of_the_layers_in_between() -> None:
    space = LayerSetSpace(6)
    assert space.size == 8
    assert [space.count(ratio) for ratio in (0, 0.45, 0.5)] == [0, 4, 4]
    skip = SkipSet(frozenset({1, 4}), frozenset({2}))
    z = space.from_skip_set(skip)
    assert z.tolist() == [True, False, False, True, False, True, False, False]
    assert space.to_skip_set(z) == skip
    for wrong in (SkipSet(frozenset({0})), SkipSet(frozenset(), frozenset({5})), SkipSet(frozenset({-1}))):
        with pytest.raises(ValueError, match="of layers 1 to 4 may be skipped in a model of 6 layers"):
            space.from_skip_set(wrong)
    with pytest.raises(ValueError, match="skips nothing"):
        space.from_skip_set(SkipSet())
    with pytest.raises(ValueError, match="skips everything between the first and the last layer"):
        space.from_skip_set(SkipSet(frozenset(range(1, 5)), frozenset(range(1, 5))))
    with pytest.raises(ValueError, match="at least 4 layers, found 3"):
        LayerSetSpace(3)
    for count in (0, 8, 9):
        with pytest.raises(ValueError, match="skips 1 to 7 sublayers of this model"):
            LinearThompson(space, count)
    search = LayerSetSearch(space, 3, first=space.uniform(3))
    assert (search.best() == space.uniform(3)).all()
    assert not search.adaptive


@pytest.mark.parametrize("layers", [4, 7, 24, 82])
def test_uniform_sets_are_spread_evenly_over_the_depth(layers: int) -> None:
    space = LayerSetSpace(layers)
    for count in range(1, space.size):
        z = space.uniform(count)
        assert z.sum() == count
        middle = layers - 2
        assert 0 <= z[:middle].sum() - z[middle:].sum() <= 1, "as many attentions as MLPs"
        for half in (z[:middle], z[middle:]):
            gaps = np.diff(np.flatnonzero(half))
            assert not len(gaps) or gaps.max() - gaps.min() <= 1


def test_expected_speed_up_and_costs_by_hand() -> None:
    """m = .5, c = .25, v(2) = 1.2, v(3) = 1.4: 1.5 / (.25 + 1.2) against 1.75 / (.5 + 1.4)."""
    costs = SkipCosts(0, 0, (1.0, 1.2, 1.4))
    assert expected_speedup(0.5, 0.25, costs, max_drafts=2) == pytest.approx(max(1.5 / 1.45, 1.75 / 1.9))
    assert expected_speedup(0.1, 0.9, costs) == pytest.approx(1.1 / 2.1), "below 1 if drafting does not pay"
    many = expected_speedup(np.array([0.5, 0.1]), np.array([0.25, 0.9]), costs, max_drafts=2)
    assert many.tolist() == pytest.approx([1.5 / 1.45, 1.1 / 2.1])
    assert expected_speedup(1.0, 0.1, SkipCosts(0, 0, (1.0,) * 9), max_drafts=4) == pytest.approx(5 / 1.4)
    z = LayerSetSpace(6).from_skip_set(SkipSet(frozenset({1, 2, 3}), frozenset({4})))
    assert SkipCosts(0.02, 0.05, (1.0, 1.1)).draft(z) == pytest.approx(1 - 3 * 0.02 - 0.05)


def test_the_best_set_of_a_linear_model_is_found_exactly() -> None:
    """Against all sets of 4 of 8 sublayers, for random weights."""
    space, objective = LayerSetSpace(6), SearchObjective(SkipCosts(0.03, 0.08, tuple(1 + 0.1 * extra for extra in range(9))))
    for seed in range(10):
        search = LinearThompson(space, 4, objective, seed)
        weights = np.append(-np.random.default_rng(seed).random(8) / 6, 1.0)
        every = [np.isin(np.arange(8), places) for places in itertools.combinations(range(8), 4)]
        values = [objective(float(weights[:-1][z].sum() + 1), z) for z in every]
        found, worth = search._argmax(weights, 4)
        assert objective(float(weights[:-1][found].sum() + 1), found) == pytest.approx(max(values)) == pytest.approx(worth)


def test_the_posterior_is_that_of_bayesian_linear_regression(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mean and covariance against the normal equations, nothing forgotten."""
    monkeypatch.setattr(LinearThompson, "FORGET", 1.0)
    space, rng = LayerSetSpace(6), np.random.default_rng(0)
    search = LinearThompson(space, 4, SearchObjective(COSTS), 0)
    precision = np.linalg.inv(search.root @ search.root.T)
    shift = precision @ search.mean
    for _ in range(40):
        z, m = space.random(4, rng), float(rng.uniform(0.3, 0.9))
        search.observe(z, m, 32)
        x, noise = np.append(z, 1.0), m * (1 - m) / 32
        precision, shift = precision + np.outer(x, x) / noise, shift + x * m / noise
    covariance = np.linalg.inv(precision)
    assert search.mean == pytest.approx(covariance @ shift)
    assert search.root @ search.root.T == pytest.approx(covariance)
    assert search.estimate(z) == pytest.approx(float(np.append(z, 1.0) @ covariance @ shift))


def test_a_lucky_set_is_evaluated_again() -> None:
    """One lucky evaluation does not make the best set of a search by chance."""
    space = LayerSetSpace(8)
    search = SEARCHES["random"](space, 5, SearchObjective(by="matchness"), 0)
    steady, lucky = space.uniform(5), space.random(5, np.random.default_rng(1))
    for _ in range(8):
        search.observe(steady, 0.8, 32)
    search.observe(lucky, 0.82, 32)
    assert (search.best() == steady).all()
    again = [search.propose() for _ in range(4) if search.observe(space.random(5, search.rng), 0.1, 32) is None]
    assert any((z == lucky).all() for z in again)


def test_the_papers_search_keeps_the_highest_score_and_uses_a_gaussian_process_at_every_interval() -> None:
    space = LayerSetSpace(8)
    search = SwiftSearch(space, 5, SearchObjective(by="matchness"), 0, interval=4)
    bayesian: list[int] = []
    own = search._by_gaussian_process
    search._by_gaussian_process = lambda: bayesian.append(search.observations) or own()  # type: ignore[method-assign, func-returns-value]
    assert (search.propose() == space.uniform(5)).all()
    lucky = space.random(5, np.random.default_rng(1))
    for score in (0.82, 0.1):
        search.observe(lucky, score, 32)
    for _ in range(10):
        search.observe(search.propose(), 0.5, 32)
    assert (search.best() == lucky).all()
    assert search.estimate(lucky) == pytest.approx(0.82)
    assert bayesian == [7, 11], "after 3 steps two sets are known, too few for a process"
    search.observe(space.random(5, np.random.default_rng(2)), 0.82, 32)
    assert (search.best() == lucky).all(), "an equal score is not better"


def test_a_gaussian_process_proposes_near_a_good_set_and_another_size_may_follow() -> None:
    space = LayerSetSpace(12)
    search, linear = (
        SwiftSearch(space, 8, SearchObjective(by="matchness"), 0),
        LinearThompson(space, 8, SearchObjective(COSTS), 0),
    )
    good = space.uniform(8)
    for number in range(24):
        z = good if number == 5 else space.random(8, np.random.default_rng(number))
        for one in (search, linear):
            one.observe(z, 0.95 if number == 5 else 0.3, 320)
    assert (search.propose() & good).sum() >= 7
    linear.resize(6)
    assert linear.best().sum() == linear.propose().sum() == 6


def optimisation(**settings: Any) -> LayerSetOptimisation:
    return LayerSetOptimisation(Swift(0.5, **settings), ModelRunner(llama(layers=6)))


def test_the_set_with_the_highest_score_drafts_until_the_search_ends() -> None:
    """Section 4.1.2 by hand: sets of 4 of 8 sublayers, the third is the best; the search gives up three evaluations later."""
    found = optimisation(patience=3)
    first: Any = found.candidate()
    assert (first == LayerSetSpace(6).uniform(4)).all(), "the uniform set is evaluated first"
    others = (np.isin(np.arange(8), places) for places in itertools.combinations(range(8), 4))
    sets = [first, *itertools.islice(others, 5)]
    used = []
    for mask, score in zip(sets, (0.5, 0.4, 0.6, 0.6, 0.1, 0.2), strict=True):
        assert found.searching
        found.evaluated(mask, score, 32)
        used.append(next(number for number, one in enumerate(sets) if (one == found.skipped).all()))
    assert used == [0, 0, 2, 2, 2, 2]
    assert found.matchness == pytest.approx(0.6)
    assert found.candidate() is None
    assert [one["evaluation"] for one in found.report()["history"]] == [0, 3]


def test_a_search_ends_at_its_most_steps_or_with_a_set_that_is_good_enough() -> None:
    for settings, scores in (({"max_steps": 2}, [0.5, 0.4]), ({"target_matchness": 0.9}, [0.9, 0.91]), ({"max_steps": 0}, [])):
        search = optimisation(**settings)
        for place, score in enumerate(scores):
            assert search.searching
            search.evaluated(search.space.random(4, np.random.default_rng(place)), score, 32)
        assert not search.searching
