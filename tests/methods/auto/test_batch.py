"""Rows of a batch share their draft steps, and draft on at one price: near the best lengths there are, where rows that each pay
for themselves are not."""

from __future__ import annotations

import itertools

import pytest
import torch

from skipstone.control import control, learning, price
from skipstone.control.costs import Cost, Costs
from skipstone.control.ledger import Account, Ledger
from skipstone.control.state import LOOKUP, PLAIN, Done, Plan, State
from skipstone.engines.engine import SurvivalThresholds
from skipstone.methods.auto.mind import Mind
from skipstone.methods.auto.texts import progress
from skipstone.methods.drafting.confidence import SurvivalRule

MOST, FIXED = 8, 0.02

ROWS = [(0.9, 0.9, 0.9), (0.9, 0.5, 0.2), (0.95, 0.7, 0.4), (0.6, 0.5, 0.4), (0.97, 0.1, 0.1, 0.1)]
"""The acceptances of every row's drafts, which all rows' confidences tell."""


def lengths(acceptances: tuple[float, ...], step: float, slope: float, worth: float, *, together: bool) -> list[int]:
    """How many drafts every row makes. slope: what scoring a token of every row costs."""
    rows, mean, scoring = len(acceptances), sum(acceptances) / len(acceptances), _scoring(slope)
    least = price.thresholds(step, FIXED, scoring, mean, worth, MOST)
    beside = price.thresholds(0.0, 0.0, scoring, mean, worth, MOST)
    if least[0] > 1:
        return [0] * rows
    survival = SurvivalThresholds(1.0, 0.0, least[1:], beside[1:] if together else ())
    stop = SurvivalRule(survival, rows, rows, torch.device("cpu"))
    going, counts = torch.ones(rows, dtype=torch.bool), [0] * rows
    while going.any():
        counts = [count + int(goes) for count, goes in zip(counts, going, strict=True)]
        on = stop.keep(torch.tensor(acceptances))
        assert on is not None
        going = going & on
        if stop.joint:
            going = going & stop.together(going)
    return counts


def _scoring(slope: float) -> price.Scoring:
    return lambda tokens: 1.0 + slope * (tokens - 1)


def rate(acceptances: tuple[float, ...], counts: tuple[int, ...] | list[int], step: float, slope: float) -> float:
    """Tokens of a row in a plain step."""
    rows, drafted = len(acceptances), max(counts)
    tokens = 1 + sum(chance**n for chance, count in zip(acceptances, counts, strict=True) for n in range(1, count + 1)) / rows
    return tokens / (drafted * step + 1 + slope * sum(counts) / rows + (FIXED if drafted else 0.0))


def reached(acceptances: tuple[float, ...], step: float, slope: float, *, together: bool) -> float:
    """The rate at the price that it brings about itself, as a share of the best one's."""
    best = max(rate(acceptances, counts, step, slope) for counts in itertools.product(range(MOST + 1), repeat=len(acceptances)))
    worth = 1.0
    for _ in range(12):
        counts = lengths(acceptances, step, slope, worth, together=together)
        worth = max(1.0, rate(acceptances, counts, step, slope))
    return worth / best


@pytest.mark.parametrize("slope", [0.02, 0.1])
@pytest.mark.parametrize("step", [0.15, 0.3])
@pytest.mark.parametrize("rows", ROWS, ids=str)
def test_one_price_is_near_the_best_lengths(rows: tuple[float, ...], step: float, slope: float) -> None:
    assert reached(rows, step, slope, together=True) >= 0.88


def test_rows_that_each_pay_a_whole_draft_step_or_none_are_not() -> None:
    shares = [reached(rows, 0.3, slope, together=False) for rows in ROWS for slope in (0.02, 0.1)]
    assert min(shares) < 0.85


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


def test_a_batch_drafts_less_as_rows_are_added_that_gain_nothing() -> None:
    """At the same thresholds: what one good row would pay alone it does not pay for eight."""
    assert [stopped([0.9, *[0.01] * others], 0.3, 0.05)[0] for others in (0, 1, 2, 3, 7)] == [True, True, True, False, False]


def test_what_may_be_lost_is_lost_once_however_many_rows_decode() -> None:
    """Had every number of rows an account of its own, a batch that ends row by row would lose eight times as much."""
    costs, lost = Costs(Cost(1.0, 3)), Ledger(request=Account(9.0, 50.0))
    mind = Mind({1: State(costs, {}), 8: State(costs, {}, ledger=lost, rows=8, shadow_account=-1.0)}, live=8)
    for live in (7, 1, 8):
        mind.resize(live)
        assert mind.state is not None
        assert mind.state.ledger == lost
        assert mind.state.shadow_account == -1.0
        assert control.decide(mind.state).kind == PLAIN


def test_a_batch_is_as_far_as_its_slowest_row() -> None:
    assert progress([50, 50, 50], [9, 1, 3], []) == 1, "one row was right, and the batch ends no sooner for it"
    assert progress([50, 20, 50], [2, 1, 3], []) == 2, "a row that is ahead may wait"
    assert progress([50, 10, 0], [4, 2, 0], [0]) == 4, "a row that ends early was not drafted to its end"
    assert progress([7], [7], [0]) == 7


def test_what_one_row_wins_pays_no_other_rows_time() -> None:
    state = State(Costs(Cost(1.0, 3)), {}, rows=8)
    plan = Plan(LOOKUP, 1.0, None, "", drafts=(24, 0, 0, 0, 0, 0, 0, 0))
    after = learning.observe(state, plan, Done(4.0, 3.0, verified=3, scoring=3.0, slowest=1))
    assert after.ledger.request.plain == 1
    assert after.ledger.request.debt > 0
