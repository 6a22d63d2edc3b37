"""Rows of a batch share their draft steps and the regret budget. Other numbers of rows have other times."""

from __future__ import annotations

import pytest
import torch

from skipstone.engines.engine import SurvivalThresholds
from skipstone.methods.auto.learned import Learned
from skipstone.methods.drafting.confidence import SurvivalRule
from skipstone.policy.choose_drafter import PLAIN, Policy
from skipstone.policy.cost_model import FIRST_SLOPE, HOST, LearnedCosts, LineTime, MeanTime, ScoringTime
from skipstone.policy.regret_budget import RegretBudget


def stopped(survivals: list[float], least: float, beside: float) -> list[bool]:
    """Which rows draft on behind their first drafts, of these survivals."""
    rows = len(survivals)
    stop = SurvivalRule(SurvivalThresholds(1.0, 0.0, (least,), (beside,)), rows, rows, torch.device("cpu"))
    on = stop.keep(torch.tensor(survivals))
    assert on is not None
    return (on & stop.together(on)).tolist()


def test_rows_pay_for_a_draft_step_together() -> None:
    """Of four rows, whose draft step costs 4 x (.5 - .1) = 1.6 above what scoring costs."""
    assert stopped([0.9, 0.91, 0.05, 0.05], 0.5, 0.1) == [True, True, False, False], "1.61 pays"
    assert stopped([0.9, 0.89, 0.05, 0.05], 0.5, 0.1) == [False] * 4, "1.59 does not"
    assert stopped([0.9, 0.72, 0.3, 0.05], 0.5, 0.1) == [True, True, True, False], "a row below .5 goes along"
    assert stopped([0.5], 0.5, 0.1) == [True], "one row alone pays all"
    assert stopped([0.49], 0.5, 0.1) == [False]


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
    assert eight.policy.rows == 8
    assert not eight.policy.costs.plain.measurements
    assert not eight.policy.costs.timed_at
    assert eight.policy.matches == one.matches
    assert one.costs.timed_at, "what is known of one row stays"


def test_scoring_of_more_rows_is_that_of_as_many_more_tokens() -> None:
    eight = ScoringTime().among(8)
    for n in (2, 4, 12):
        assert eight(n) == pytest.approx((1 + FIRST_SLOPE * (8 * n - 1)) / (1 + FIRST_SLOPE * 7))
    assert eight.among(1 / 8)(6) == pytest.approx(ScoringTime()(6))
