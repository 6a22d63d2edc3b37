"""Where SWIFT drafts: traces by hand, and a bound on what is lost that holds for any luck."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from skipstone.methods.shared.guard import (
    LEAST_LATELY,
    LEAST_PLAIN,
    MOST_SLACK,
    MOST_WAIT,
    PROBE,
    REFRESH,
    SEVERAL,
    START,
    Guard,
)

COST = 2.0


def warmed(allowance: float = 0.06) -> Guard:
    """A guard that has seen as many plain steps as it needs."""
    guard = Guard(allowance)
    for _ in range(LEAST_PLAIN):
        assert guard.room(8, COST) == 0, "there is nothing to compare with"
        guard.clocked(1.0, 0.5, plain=True)
        guard.learn(1, 1, drafted=False)
    return guard


def test_it_tries_then_drafts_while_it_pays_and_looks_at_plain_steps_now_and_then() -> None:
    guard = warmed()
    assert guard.room(8, COST) == PROBE, "a probe"
    guard.learn(3, 2, drafted=True)
    assert guard.pays()
    rooms = []
    for _ in range(REFRESH):
        rooms.append(guard.room(8, COST))
        guard.learn(3, 2, drafted=rooms[-1] > 0)
    assert sorted(rooms) == [0] + [8] * (REFRESH - 1)


def test_failures_double_the_wait_and_a_success_ends_it() -> None:
    guard = warmed()
    gaps, gap = [], 0
    while len(gaps) < 8:
        if guard.room(8, COST):
            guard.learn(1, 1.1, drafted=True)
            gaps.append(gap)
            gap = 0
        else:
            guard.learn(1, 1, drafted=False)
            gap += 1
    assert gaps == [0, 2, 4, 8, 16, 16, 16, 16]
    assert max(gaps) == MOST_WAIT
    assert guard.worth() is None
    while not guard.room(8, COST):
        guard.learn(1, 1, drafted=False)
    guard.learn(2, 1.9, drafted=True)
    assert guard.wait == 1
    assert guard.pays(), "what was lost before is forgotten"
    for _ in range(LEAST_LATELY - 9):
        guard.learn(1, 1.25, drafted=True)
    worth = guard.worth()
    assert worth is not None
    assert math.isclose(worth, (2 + LEAST_LATELY - 1) / (1.9 + 8 * 1.1 + (LEAST_LATELY - 9) * 1.25))


def test_steps_that_clearly_gain_need_no_slack() -> None:
    """Timings may have spent it; three steps are not enough, nor is a small gain."""
    for tokens, cost, steps, drafts in ((3, 2.5, 4, 8), (3, 2.5, 3, 0), (3, 2.9, 6, 0)):
        guard = warmed()
        for _ in range(steps):
            guard.learn(tokens, cost, drafted=True)
        guard.lose(40)
        assert guard.pays()
        assert guard.room(8, COST) == drafts


def test_old_steps_are_forgotten() -> None:
    guard = warmed()
    for _ in range(40):
        guard.learn(5, 2, drafted=True)
    lost = 0
    while guard.pays():
        guard.learn(1, 3, drafted=True)
        lost += 1
    assert lost == 8, "4 steps that brought 3 too many, 8 that brought 2 too few"
    guard.another_set()
    assert not guard.pays()
    assert guard.wait == guard.waited == 1


def test_nothing_is_tried_without_slack_but_dear_things_are_possible() -> None:
    guard = warmed(0.0)
    assert guard.affords(START)
    guard.lose(START)
    assert not guard.affords(0.1)
    assert guard.room(8, COST) == 0
    for _ in range(3):
        guard.learn(50, 1, drafted=True)
    assert guard.slack == MOST_SLACK
    assert guard.affords(1000.0)


def test_the_clock_counts_and_spikes_do_not() -> None:
    guard = warmed()
    assert guard.clocked(2.0, 0.5, plain=False) == 0.5, "as long as a plain step, where two were expected"
    assert guard.clocked(2.0, 100.0, plain=False) == 3
    assert guard.clocked(2.0, None, plain=False) == 3, "nobody looked: as the latest that drafted"
    guard.clocked(1.0, 50.0, plain=True)
    assert guard.plain[-1] == 1.5


def test_where_it_pays_and_the_slack_is_spent_drafting_comes_back_soon() -> None:
    guard = warmed(0.02)
    for _ in range(SEVERAL - 1):
        guard.learn(4, 2, drafted=True)
    guard.lose(guard.slack + 7)
    waited = 0
    while not (room := guard.room(8, COST)):
        guard.learn(1, 1, drafted=False)
        waited += 1
    assert room == PROBE
    assert waited == MOST_WAIT
    while guard.slack < 0:
        guard.learn(4, 2, drafted=guard.room(8, COST) > 0)
    assert guard.room(8, COST) == 8


def test_another_text_is_compared_with_its_own_plain_steps() -> None:
    guard = warmed()
    guard.learn(4, 2, drafted=True)
    guard.another_text()
    assert guard.room(8, COST) == 0
    guard.clocked(1.0, 0.45, plain=True)
    assert guard.room(8, COST) == 8
    assert guard.clocked(1.0, 0.5, plain=False) == 1.0


def test_a_text_whose_plain_steps_cost_something_else_is_compared_with_three_of_its_own() -> None:
    guard = warmed()
    guard.learn(4, 2, drafted=True)
    guard.another_text()
    for left in (2, 1, 0):
        assert guard.room(8, COST) == 0
        guard.clocked(1.0, 0.1, plain=True)
        assert len(guard.plain) == LEAST_PLAIN - left
    assert guard.room(8, COST) == 8
    assert guard.clocked(1.0, 0.1, plain=False) == 1.0


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 2)), min_size=50, max_size=400), st.floats(0, 0.1))
def test_what_is_lost_is_bounded(luck: list[tuple[int, float]], allowance: float) -> None:
    """Whatever drafts bring (accepted tokens, cost of the step beyond a plain one) and whatever else is tried: the allowance,
    what there is at first, a step beyond it; without any slack a probe now and then (`hoped`), or drafts that gain until one
    step ends that (`dared`)."""
    guard = warmed(allowance)
    tokens, spent, hoped, dared, runs = float(LEAST_PLAIN), float(LEAST_PLAIN), 0.0, 0.0, 0
    for accepted, more in luck:
        if guard.affords(more):
            guard.lose(more)
            spent += more
        gaining, spendable, drafted = guard.gains(), guard.slack >= 0, guard.room(6, COST)
        dear = more if drafted == PROBE else 3 * more  # the longer the dearer
        brought, cost = (1 + accepted, 1 + dear) if drafted else (1, 1.0)
        guard.learn(brought, cost, drafted > 0)
        tokens, spent = tokens + brought, spent + cost
        if drafted and not spendable:
            hoped += 0.0 if gaining else COST
            ended = gaining and not guard.gains()
            runs += ended
            dared += max(cost - brought, 0.0) if ended else 0.0
        assert spent <= (1 + allowance) * tokens + START + 3 * COST + hoped + dared
    assert hoped <= COST * (1 + len(luck) / MOST_WAIT)
    assert runs <= 1 + len(luck) / SEVERAL
