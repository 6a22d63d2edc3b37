"""What `auto` adds up within a plan, and when it learns from it."""

from dataclasses import replace
from pathlib import Path

import pytest

from skipstone.control import control, learning
from skipstone.control.costs import FIRST_SLOPE, Cost, Costs, Line, Scoring
from skipstone.control.ledger import Account, Ledger
from skipstone.control.record import Log, replayed
from skipstone.control.state import PLAIN, Done, Drafter, Plan, Rate, State
from skipstone.methods.auto.mind import LATEST_LEARNT, LEARNT_AT_ONCE, PAUSE, Mind, Taken, Tally, Worth

PLAN = Plan("E6", 1.0, "E6", "", thresholds=(0.0,) * 4)
WON = Done(3.0, 1.5, ((0.9, True),) * 2, 2, 2, 0.3, 1.2)


def mind(debt: float) -> Mind:
    """Of one drafter, with a request in which so many plain steps were lost."""
    ledger = Ledger(overall=Account(debt, 50.0), request=Account(debt, 50.0))
    state = State(Costs(Cost(1.0, 3), drafts={"E6": Line(0.15, 0.0, 30)}), {"E6": Drafter()}, ledger=ledger, current="E6")
    return Mind(states={1: state})


def test_a_tally_sums_steps_and_looks_closely_at_the_first() -> None:
    tally = Tally()
    for verified, slowest in ((2, 3.0), (5, 1.0), (1, 2.0)):
        tally.add(replace(WON, verified=verified, passes=verified, slowest=slowest, aside_seconds=0.1))
    done = tally.done()
    assert (done.tokens, done.seconds, done.steps, done.slowest) == (9.0, 4.5, 3, 6.0)
    assert done.aside_seconds == pytest.approx(0.3)
    assert (done.verified, done.passes, done.more_verified, done.more_passes) == (2, 2, 6, 6)
    assert (done.confidences, done.drafting, done.scoring) == ([*WON.confidences] * 3, WON.drafting, WON.scoring)


def test_of_a_trial_the_last_step_is_looked_at() -> None:
    """Those before it find the caches as another drafter has left them."""
    tally = Tally()
    for verified, drafting in ((2, 0.9), (4, 0.5), (3, 0.3)):
        tally.add(replace(WON, verified=verified, passes=verified, drafting=drafting), trial=True)
    done = tally.done()
    assert (done.steps, done.verified, done.passes, done.drafting) == (3, 3, 3, 0.3)
    assert (done.more_verified, done.more_passes) == (6, 6)


def test_what_won_time_is_learnt_from_together_and_comes_to_the_same() -> None:
    mine = mind(-40.0)
    state, expected = mine.state, mine.state
    assert expected is not None
    for behind in range(LEARNT_AT_ONCE):
        assert (mine.state, mine.behind) == (state, behind), "nothing was learnt yet"
        mine.took(Taken([], PLAN, PLAN, WON, behind))
        expected = learning.observe(expected, PLAN, WON)
    assert (mine.state, mine.behind) == (expected, 0)


@pytest.mark.parametrize(("debt", "at_once"), [(-40.0, False), (2.0, True)])
def test_a_loss_is_learnt_from_at_once_where_little_more_may_be_lost(debt: float, at_once: bool) -> None:
    mine = mind(debt)
    mine.took(Taken([], PLAN, PLAN, replace(WON, tokens=1.0), 0))
    assert (mine.behind == 0) is at_once


def test_plain_steps_are_learnt_from_at_once() -> None:
    mine = mind(-40.0)
    mine.took(Taken([], None, Plan(PLAIN, 1.0, "E6", ""), Done(1.0, 1.0), 0))
    assert mine.behind == 0


def test_a_log_knows_what_a_decision_did_not_know_yet(tmp_path: Path) -> None:
    mine = mind(-40.0)
    mine.log = Log.at(tmp_path / "log")
    assert mine.state is not None
    mine.log.state(1, mine.state)
    for _ in range(2 * LEARNT_AT_ONCE):
        assert mine.state is not None
        plan = control.decide(mine.state)
        mine.took(Taken([], plan, plan, WON if plan.kind == "E6" else Done(1.0, 1.0), mine.behind))
    mine.learn()
    found = list(replayed(tmp_path / "log"))
    assert len(found) == 2 * LEARNT_AT_ONCE
    assert all(one.same for one in found)


def test_scoring_of_more_rows_is_that_of_as_many_more_tokens() -> None:
    eight = Scoring().among(8)
    for n in (2, 4, 12):
        assert eight(n) == pytest.approx((1 + FIRST_SLOPE * (8 * n - 1)) / (1 + FIRST_SLOPE * 7))
    assert eight.among(1 / 8)(6) == pytest.approx(Scoring()(6))


def test_a_batch_whose_rows_differ_drafts_less() -> None:
    state = mind(0.0).state
    assert state is not None
    even, spread = (learning._priced(replace(state, rows=4, spread=one), "E6") for one in (Rate(8.0, 8.0), Rate(16.0, 8.0)))
    assert spread.least == pytest.approx(tuple(2 * one for one in even.least))


def test_of_plain_steps_only_those_that_are_warm_tell() -> None:
    tally = Tally()
    for seconds, warm in ((1.3, False), (1.1, False), (9.0, True), (1.0, True), (1.2, True)):
        tally.plain(1.0, seconds, True, warm, False)
    done = tally.done()
    assert (done.tokens, done.steps, done.busy) == (5.0, 5, (0, 0.0))
    mean = (1.0 + 1.2 + 1.5 * 1.2) / 3  # a stall counts as one and a half times the median
    assert (done.warm, done.warm_median) == ((3, pytest.approx(mean)), 1.2)
    assert done.seconds == pytest.approx(13.6)
    tally.plain(1.0, 5.0, False, True, False)
    assert tally.done().busy == (1, 5.0)
    assert tally.done().warm == (3, pytest.approx(mean)), "something else was done in the last one"


def test_looking_up_pays_while_it_gains_more_than_it_takes() -> None:
    worth = Worth()
    assert worth.pays, "at first"
    for _ in range(200):
        worth.add(0.0, 0.05)
    assert not worth.pays
    for _ in range(20):
        worth.add(3.0, 0.05)
    assert worth.pays


def test_a_pause_while_it_learns_says_nothing_of_what_learning_takes() -> None:
    mind = Mind()
    assert [mind.uninterrupted(0.001) for _ in range(LATEST_LEARNT)] == [0.001] * LATEST_LEARNT
    assert mind.uninterrupted(0.2) == pytest.approx(PAUSE * 0.001)
    assert mind.uninterrupted(0.2) == 0.2, "twice is no pause"
