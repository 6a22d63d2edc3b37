"""Where methods draft: traces by hand, and a bound on what is lost that holds for any luck."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipstone.methods.shared.payoff import (
    FIRST_SLACK,
    GAIN_STEPS,
    LEAST_PLAIN,
    LEAST_SPEEDUP_STEPS,
    MOST_SLACK,
    MOST_WAIT,
    PROBE,
    REFRESH,
    Payoff,
    TextChange,
)

COST = 2.0


def warmed(allowance: float = 0.06) -> Payoff:
    """One that has seen as many plain steps as it needs."""
    payoff = Payoff(allowance)
    for _ in range(LEAST_PLAIN):
        assert payoff.most_drafts(8, COST) == 0, "there is nothing to compare with"
        payoff.clock(1.0, 0.5, drafted=False)
        payoff.record(1, 1, drafted=False)
    return payoff


def test_it_tries_then_drafts_while_it_pays_and_looks_at_plain_steps_now_and_then() -> None:
    payoff = warmed()
    assert payoff.most_drafts(8, COST) == PROBE, "a probe"
    payoff.record(3, 2, drafted=True)
    assert payoff.pays()
    rooms = []
    for _ in range(REFRESH):
        rooms.append(payoff.most_drafts(8, COST))
        payoff.record(3, 2, drafted=rooms[-1] > 0)
    assert sorted(rooms) == [0] + [8] * (REFRESH - 1)


def test_failures_double_the_wait_and_a_success_ends_it() -> None:
    payoff = warmed()
    gaps, gap = [], 0
    while len(gaps) < 8:
        if payoff.most_drafts(8, COST):
            payoff.record(1, 1.1, drafted=True)
            gaps.append(gap)
            gap = 0
        else:
            payoff.record(1, 1, drafted=False)
            gap += 1
    assert gaps == [0, 2, 4, 8, 16, 16, 16, 16]
    assert max(gaps) == MOST_WAIT
    assert payoff.speedup() is None
    while not payoff.most_drafts(8, COST):
        payoff.record(1, 1, drafted=False)
    payoff.record(2, 1.9, drafted=True)
    assert payoff.probe_wait == 1
    assert payoff.pays(), "what was lost before is forgotten"
    for _ in range(LEAST_SPEEDUP_STEPS - 9):
        payoff.record(1, 1.25, drafted=True)
    speedup = payoff.speedup()
    assert speedup is not None
    assert math.isclose(speedup, (2 + LEAST_SPEEDUP_STEPS - 1) / (1.9 + 8 * 1.1 + (LEAST_SPEEDUP_STEPS - 9) * 1.25))


def test_steps_that_clearly_gain_need_no_slack() -> None:
    """Timings may have spent it; three steps are not enough, nor is a small gain."""
    for tokens, cost, steps, drafts in ((3, 2.5, 4, 8), (3, 2.5, 3, 0), (3, 2.9, 6, 0)):
        payoff = warmed()
        for _ in range(steps):
            payoff.record(tokens, cost, drafted=True)
        payoff.spend(40)
        assert payoff.pays()
        assert payoff.most_drafts(8, COST) == drafts


def test_old_steps_are_forgotten() -> None:
    payoff = warmed()
    for _ in range(40):
        payoff.record(5, 2, drafted=True)
    lost = 0
    while payoff.pays():
        payoff.record(1, 3, drafted=True)
        lost += 1
    assert lost == 8, "4 steps that brought 3 too many, 8 that brought 2 too few"
    payoff.forget_drafts()
    assert not payoff.pays()
    assert payoff.probe_wait == payoff.since_probe == 1


def test_nothing_is_tried_without_slack_but_dear_things_are_possible() -> None:
    payoff = warmed(0.0)
    assert payoff.affords(FIRST_SLACK)
    payoff.spend(FIRST_SLACK)
    assert not payoff.affords(0.1)
    assert payoff.most_drafts(8, COST) == 0
    for _ in range(3):
        payoff.record(50, 1, drafted=True)
    assert payoff.slack == MOST_SLACK
    assert payoff.affords(1000.0)


def test_the_clock_counts_and_spikes_do_not() -> None:
    payoff = warmed()
    assert payoff.clock(2.0, 0.5, drafted=True) == 0.5, "as long as a plain step, where two were expected"
    assert payoff.clock(2.0, 100.0, drafted=True) == 3
    assert payoff.clock(2.0, None, drafted=True) == 3, "nobody looked: as the latest that drafted"
    payoff.clock(1.0, 50.0, drafted=False)
    assert payoff.plain_seconds[-1] == 1.5


def test_where_it_pays_and_the_slack_is_spent_drafting_comes_back_soon() -> None:
    payoff = warmed(0.02)
    for _ in range(GAIN_STEPS - 1):
        payoff.record(4, 2, drafted=True)
    payoff.spend(payoff.slack + 7)
    waited = 0
    while not (room := payoff.most_drafts(8, COST)):
        payoff.record(1, 1, drafted=False)
        waited += 1
    assert room == PROBE
    assert waited == MOST_WAIT
    while payoff.slack < 0:
        payoff.record(4, 2, drafted=payoff.most_drafts(8, COST) > 0)
    assert payoff.most_drafts(8, COST) == 8


def test_another_text_is_compared_with_its_own_plain_steps() -> None:
    payoff = warmed()
    payoff.record(4, 2, drafted=True)
    payoff.begin_text()
    assert payoff.most_drafts(8, COST) == 0
    payoff.clock(1.0, 0.45, drafted=False)
    assert payoff.most_drafts(8, COST) == 8
    assert payoff.clock(1.0, 0.5, drafted=True) == 1.0


def test_a_text_whose_plain_steps_cost_something_else_is_compared_with_three_of_its_own() -> None:
    payoff = warmed()
    payoff.record(4, 2, drafted=True)
    payoff.begin_text()
    for left in (2, 1, 0):
        assert payoff.most_drafts(8, COST) == 0
        payoff.clock(1.0, 0.1, drafted=False)
        assert len(payoff.plain_seconds) == LEAST_PLAIN - left
    assert payoff.most_drafts(8, COST) == 8
    assert payoff.clock(1.0, 0.1, drafted=True) == 1.0


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 2)), min_size=50, max_size=400), st.floats(0, 0.1))
def test_what_is_lost_is_bounded(luck: list[tuple[int, float]], allowance: float) -> None:
    """Whatever drafts bring (accepted tokens, cost of the step beyond a plain one) and whatever else is tried: the allowance,
    what there is at first, a step beyond it; without any slack a probe now and then (`hoped`), or drafts that gain until one
    step ends that (`dared`)."""
    payoff = warmed(allowance)
    tokens, spent, hoped, dared, runs = float(LEAST_PLAIN), float(LEAST_PLAIN), 0.0, 0.0, 0
    for accepted, more in luck:
        if payoff.affords(more):
            payoff.spend(more)
            spent += more
        gaining, spendable, drafted = payoff.gains(), payoff.slack >= 0, payoff.most_drafts(6, COST)
        dear = more if drafted == PROBE else 3 * more  # the longer the dearer
        brought, cost = (1 + accepted, 1 + dear) if drafted else (1, 1.0)
        payoff.record(brought, cost, drafted > 0)
        tokens, spent = tokens + brought, spent + cost
        if drafted and not spendable:
            hoped += 0.0 if gaining else COST
            ended = gaining and not payoff.gains()
            runs += ended
            dared += max(cost - brought, 0.0) if ended else 0.0
        assert spent <= (1 + allowance) * tokens + FIRST_SLACK + 3 * COST + hoped + dared
    assert hoped <= COST * (1 + len(luck) / MOST_WAIT)
    assert runs <= 1 + len(luck) / GAIN_STEPS


def shares(rng: np.random.Generator, mean: float, spread: float, count: int) -> list[float]:
    """Accepted / drafted of steps; spread None: one draft a step, right or wrong."""
    if spread < 0:
        return (rng.random(count) < mean).astype(float).tolist()
    return np.clip(rng.normal(mean, spread, count), 0, 1).tolist()


@pytest.mark.parametrize("spread", [0.15, 0.35, -1.0])
def test_a_changed_task_is_noticed_soon_and_an_unchanged_one_never(spread: float) -> None:
    for seed in range(5):
        rng, quiet = np.random.default_rng(seed), TextChange()
        assert not any(quiet.add(value) for value in shares(rng, 0.75, spread, 20_000))
        alarm = TextChange()
        assert not any(alarm.add(value) for value in shares(rng, 0.8, spread, 2000))
        after = [alarm.add(value) for value in shares(rng, 0.45, spread, 200)]
        assert any(after)
        better = TextChange()
        assert not any(better.add(value) for value in shares(rng, 0.5, spread, 2000) + shares(rng, 0.9, spread, 2000))
