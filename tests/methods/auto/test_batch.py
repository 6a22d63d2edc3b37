"""Rows of a batch share their draft steps and the regret budget, and their drafts have nearly the best lengths."""

import itertools
from typing import Any

import pytest
import torch

from skipstone.engines.engine import SurvivalThresholds
from skipstone.methods.auto.learned import Learned
from skipstone.methods.drafting.chain_stop_rule import SurvivalRule
from skipstone.policy.choose_drafter import PLAIN, Policy
from skipstone.policy.cost_model import FIRST_SLOPE, HOST, LearnedCosts, LineTime, MeanTime, ScoringTime
from skipstone.policy.draft_length import stop_thresholds
from skipstone.policy.regret_budget import RegretBudget

MAX_DRAFTS, FIXED = 8, 0.02

ROWS = [(0.9, 0.9, 0.9), (0.9, 0.5, 0.2), (0.95, 0.7, 0.4), (0.6, 0.5, 0.4), (0.97, 0.1, 0.1, 0.1)]
"""By batch, the acceptance of every row's drafts. The drafter's confidence equals it."""


def lengths(acceptances: tuple[float, ...], step: float, slope: float, price: float, *, together: bool) -> list[int]:
    """Number of drafts of every row. slope: plain steps for scoring one more token of every row."""
    rows, mean = len(acceptances), sum(acceptances) / len(acceptances)

    def scoring(tokens: float) -> float:
        return 1.0 + slope * (tokens - 1)

    alone = stop_thresholds(step, FIXED, scoring, mean, price, MAX_DRAFTS)
    shared = stop_thresholds(0.0, 0.0, scoring, mean, price, MAX_DRAFTS)
    if alone[0] > 1:
        return [0] * rows
    survival = SurvivalThresholds(1.0, 0.0, alone[1:], shared[1:] if together else ())
    stop = SurvivalRule(survival, rows, rows, torch.device("cpu"))
    going, counts = torch.ones(rows, dtype=torch.bool), [0] * rows
    while going.any():
        counts = [count + int(goes) for count, goes in zip(counts, going, strict=True)]
        on: Any = stop.keep(torch.tensor(acceptances))
        going = going & on
        if stop.joint:
            going = going & stop.together(going)
    return counts


def rate(acceptances: tuple[float, ...], counts: tuple[int, ...] | list[int], step: float, slope: float) -> float:
    """Tokens of a row per plain step."""
    rows, drafted = len(acceptances), max(counts)
    tokens = 1 + sum(chance**n for chance, count in zip(acceptances, counts, strict=True) for n in range(1, count + 1)) / rows
    return tokens / (drafted * step + 1 + slope * sum(counts) / rows + (FIXED if drafted else 0.0))


def reached(acceptances: tuple[float, ...], step: float, slope: float, *, together: bool) -> float:
    """The rate, at the price that equals it, as a share of the best rate."""
    best = max(
        rate(acceptances, counts, step, slope) for counts in itertools.product(range(MAX_DRAFTS + 1), repeat=len(acceptances))
    )
    price = 1.0
    for _ in range(12):
        counts = lengths(acceptances, step, slope, price, together=together)
        price = max(1.0, rate(acceptances, counts, step, slope))
    return price / best


@pytest.mark.parametrize("slope", [0.02, 0.1])
@pytest.mark.parametrize("step", [0.15, 0.3])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_one_price_is_near_the_best_lengths(rows: tuple[float, ...], step: float, slope: float) -> None:
    assert reached(rows, step, slope, together=True) >= 0.88


def test_rows_that_each_pay_a_whole_draft_step_or_none_are_not() -> None:
    shares = [reached(rows, 0.3, slope, together=False) for rows in ROWS for slope in (0.02, 0.1)]
    assert min(shares) < 0.85


def goes_on(survivals: list[float]) -> list[bool]:
    """The rows that draft on after their first drafts. A draft step of four rows costs 4 x (.5 - .1) = 1.6."""
    rows = len(survivals)
    stop = SurvivalRule(SurvivalThresholds(1.0, 0.0, (0.5,), (0.1,)), rows, rows, torch.device("cpu"))
    on: Any = stop.keep(torch.tensor(survivals))
    return (on & stop.together(on)).tolist()


def test_rows_pay_for_a_draft_step_together() -> None:
    assert goes_on([0.9, 0.91, 0.05, 0.05]) == [True, True, False, False], "1.61 pays"
    assert goes_on([0.9, 0.89, 0.05, 0.05]) == [False] * 4, "1.59 does not"
    assert goes_on([0.9, 0.72, 0.3, 0.05]) == [True, True, True, False], "a row below .5 goes along"
    assert [goes_on([one]) for one in (0.5, 0.49)] == [[True], [False]], "one row alone pays all"


def test_what_may_be_lost_is_lost_once_however_many_rows_decode() -> None:
    """Had every number of rows a budget of its own, a batch that ends row by row would lose eight times as much."""
    lost = RegretBudget(overall=-1.0)
    learned = Learned(
        {1: Policy(LearnedCosts(MeanTime(1.0, 3)), {}), 8: Policy(LearnedCosts(MeanTime(1.0, 3)), {}, lost, rows=8)}, live=8
    )
    for live in (7, 1, 8, 0):
        learned.resize(live)
        assert learned.policy.budget == lost
        assert learned.policy.decide().kind == PLAIN
    assert learned.live == 8, "nobody decodes in between two requests"


def test_of_another_number_of_rows_all_is_known_but_times() -> None:
    costs = LearnedCosts(MeanTime(1.0, 9), drafting={"a": LineTime(0.0, 0.3, 30)}, timed_at={"a": 5, HOST: 5})
    one = Policy(costs, {})
    eight = Learned({1: one})
    eight.resize(8)
    assert (eight.policy.rows, eight.policy.matches) == (8, one.matches)
    assert not eight.policy.costs.plain.measurements
    assert not eight.policy.costs.timed_at
    assert one.costs.timed_at, "costs of one row stay"
    scoring = ScoringTime().among(8)
    for n in (2, 4, 12):  # of every row
        assert scoring(n) == pytest.approx((1 + FIRST_SLOPE * (8 * n - 1)) / (1 + FIRST_SLOPE * 7))
    assert scoring.among(1 / 8)(6) == pytest.approx(ScoringTime()(6))
