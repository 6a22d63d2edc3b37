"""The ledger's bound, for any drafter."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipstone.control.ledger import REQUEST_CREDIT, Ledger

steps = st.tuples(st.floats(0.01, 20.0), st.integers(1, 12))  # what a drafting step takes, in plain steps, and what it commits
requests = st.lists(st.lists(steps, min_size=1, max_size=80), min_size=1, max_size=6)


@given(requests, st.floats(0.0, 0.1))
def test_no_drafter_can_lose_more_than_the_ledger_allows(given_requests: list[list[tuple[float, int]]], slack: float) -> None:
    """A request takes at most (1 + slack) x plain + REQUEST_CREDIT + the overshoot of one step."""
    ledger = Ledger(slack)
    for request in given_requests:
        ledger, time, tokens, overshoot = ledger.begin(), 0.0, 0, 0.0
        for cost, committed in request:
            if ledger.overdrawn:
                cost, committed = 1.0, 1
            else:
                overshoot = max(overshoot, cost - committed)
            ledger = ledger.add(cost, committed)
            time, tokens = time + cost, tokens + committed
            assert time <= (1 + slack) * tokens + REQUEST_CREDIT + max(overshoot, 0.0) + 1e-9


def test_plain_steps_pay_a_debt_off() -> None:
    ledger = Ledger(slack=0.02).begin().add(15.0, 1)
    assert ledger.overdrawn
    count = 0
    while ledger.overdrawn:
        ledger, count = ledger.add(1.0, 1), count + 1
    assert 300 < count < 600  # 8 steps of debt over an allowance of .02 a step; the account of all requests forgets meanwhile


def test_what_one_request_won_the_next_may_not_lose() -> None:
    rich = Ledger()
    for _ in range(100):
        rich = rich.add(1.0, 4)
    assert not rich.add(50.0, 1).overdrawn
    assert rich.begin().add(50.0, 1).overdrawn


def test_a_drafter_that_wins_is_never_stopped() -> None:
    ledger = Ledger(slack=0.0).begin()
    for _ in range(1000):
        ledger = ledger.add(1.9, 2)
        assert not ledger.overdrawn


@pytest.mark.parametrize("earlier", [50, 3000])
def test_what_was_lost_at_a_wrong_pace_is_counted_anew(earlier: int) -> None:
    """Two tokens a step of 1.5 plain steps, while all takes 1.7 times as long and nobody knows it."""
    before = known = Ledger()
    for _ in range(earlier):
        before = known = known.add(0.9, 1)
    right = before
    for _ in range(30):
        known, right = known.add(1.7 * 1.5, 2), right.add(1.5, 2)
    repriced = known.repriced(before, 60, 1.7)
    assert repriced.request.debt == pytest.approx(right.request.debt)
    assert repriced.overall.debt == pytest.approx(right.overall.debt, abs=0.5)
    assert known.request.debt > right.request.debt + 30
    assert known.repriced(before, 60, 1.0) == known
