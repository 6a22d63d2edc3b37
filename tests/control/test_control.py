"""Single decisions of the controller, and what is learnt of single steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skipstone.control import control, costs, learning
from skipstone.control.costs import Cost, Costs, Line
from skipstone.control.ledger import Account, Ledger
from skipstone.control.state import (
    LOOKUP,
    PLAIN,
    PROBE,
    RECYCLE,
    Done,
    Drafter,
    Pace,
    Plan,
    Ranks,
    Rate,
    Rates,
    Rules,
    State,
    Steady,
)
from tests.helpers.simulator import MACHINES, first_state


def state_with(**more: object) -> State:
    return replace(first_state(MACHINES["nano"], ("E6",)), position=100, **more)  # type: ignore[arg-type]


def test_it_begins_plainly_and_says_so() -> None:
    plan = control.decide(first_state(MACHINES["nano"], ("E6", "E8")))
    assert (plan.kind, plan.current) == (PLAIN, None)
    assert "plain" in plan.reason


def graded(right: float, name: str = "E6") -> State:
    """A state whose drafter was graded on 320 tokens, of which so large a share was its own."""
    state = state_with(shadow_account=1e9)
    for turn in range(10):
        marks = [((turn * 32 + place) % 100) < 100 * right for place in range(32)]
        state = learning.shadow(replace(state, position=state.position + 32), name, [0.9] * 32, marks)
    return state


def test_a_drafter_that_was_right_drafts_and_one_that_was_not_does_not() -> None:
    good, bad = control.decide(graded(0.95)), control.decide(graded(0.2))
    assert (good.kind, good.current) == ("E6", "E6")
    assert good.price > 1.3
    assert f"{good.price:.2f} x plain" in good.reason
    assert bad.kind == PLAIN


def test_a_shadow_is_paid_for_and_never_overdraws() -> None:
    state = state_with(shadow_account=0.0)
    assert control.due(state) is None
    rich = replace(state, shadow_account=1.0)
    assert control.due(rich) == "E6"
    after = learning.shadow(rich, "E6", [0.5] * 32, [True] * 32)
    assert after.shadow_account == pytest.approx(1.0 - rich.costs.shadows["E6"].value)
    assert control.due(after) is None, "it was graded up to here"


def test_debt_makes_it_plain_until_it_is_paid() -> None:
    state, plain_steps = graded(0.95), 0
    while (plan := control.decide(state)).kind == "E6":
        state = learning.observe(state, plan, Done(1, 4.0, ((0.9, False),), 1, 1, 0.25, 1.0))
    assert control.decide(state).kind == PLAIN
    assert "lost" in control.decide(state).reason
    while control.decide(state).kind == PLAIN:
        state = learning.observe(state, Plan(PLAIN, 1.0, state.current, ""), Done(1, 1.0))
        plain_steps += 1
    assert plain_steps > 30


def lost_to_stalls(every: int) -> float:
    """Plain steps that the ledger counts as lost, where of twelve steps of a drafter, expected to take 1.2 each, every so many
    takes twelve."""
    state = graded(0.95)
    plan, before = control.decide(state), state.ledger.overall
    for turn in range(12):
        seconds = 12.0 if turn % every == every - 1 else 1.2
        state = learning.observe(state, plan, Done(2, seconds, ((0.9, True),), 1, 1, 0.2, seconds - 0.2))
    return state.ledger.overall.debt - before.debt


def test_one_stall_hardly_counts_and_many_do() -> None:
    assert lost_to_stalls(100) < -5, "the drafter wins"
    assert lost_to_stalls(12) < lost_to_stalls(100) + 3, "what the machine did once is not the drafter's"
    assert lost_to_stalls(2) > 20, "what happens again and again is"


def test_the_first_step_of_a_request_counts_as_if_the_caches_were_warm() -> None:
    """A plain one would find them as cold; of the second one all counts, but that it is a stall."""
    state, done = graded(0.95), Done(2, 2.2, ((0.9, True),), 1, 1, 0.2, 2.0)
    plan = control.decide(state)
    first = learning.observe(learning.begin(state), plan, done)
    second = learning.observe(first, plan, done)
    assert first.ledger.request.debt < -0.5
    assert second.ledger.request.debt - first.ledger.request.debt == pytest.approx(0.2)


def test_of_a_drafter_that_is_known_well_four_steps_are_decided_on_at_once() -> None:
    state = replace(graded(0.95), probe_account=-9.0)
    for turn in range(costs.WELL_KNOWN - state.costs.drafts["E6"].measurements):
        plan = control.decide(state)
        assert plan.steps == 1, "its costs are measured in every step"
        state = learning.observe(state, plan, Done(2, 1.3, ((0.9, True),) * 2, 2, 2, 0.2 + 0.01 * (turn % 3), 1.1))
    plan = control.decide(state)
    assert (plan.kind, plan.steps) == ("E6", control.DRAFTING_AT_ONCE)
    four = Done(8, 5.2, ((0.9, True),) * 2, 2, 2, 0.2, 1.1, steps=4, more_verified=6, more_passes=6)
    after = learning.observe(state, plan, four)
    assert after.drafters["E6"].rate.now.steps == pytest.approx(state.drafters["E6"].rate.now.steps + 4, rel=0.05)
    assert after.ledger.overall.debt == pytest.approx(state.ledger.overall.debt - 2.8, abs=0.2)
    assert not after.pace.changed


def test_a_plan_of_several_steps_ends_where_little_more_may_be_lost_and_with_a_lookup_that_is_worth_more() -> None:
    state = replace(graded(0.95), probe_account=-9.0)
    plan, won = control.decide(state), Ledger(overall=Account(-30.0, 90.0), request=Account(-30.0, 90.0))
    assert learning.is_urgent(state, Done(1, 1.3))
    assert not learning.is_urgent(state, Done(2, 1.3))
    assert not learning.is_urgent(replace(state, ledger=won), Done(1, 1.3))
    assert control.stands(state, plan, [0])
    assert not control.stands(state, plan, [16])


def unknown(step: float, **more: object) -> State:
    """A state in which plain decoding was timed, and nothing is known of a drafter but a guess of its draft step."""
    costs = Costs(plain=Cost(1.0, 3), drafts={"E6": Line(step)}, shadows={"E6": Cost(1.0, 1)})
    return State(costs, {"E6": Drafter()}, **more)  # type: ignore[arg-type]


def test_a_drafter_that_nothing_is_known_of_is_tried_where_it_could_pay_and_the_account_can() -> None:
    plan = control.decide(unknown(0.25))
    assert (plan.kind, plan.trial) == ("E6", True)
    assert "tried" in plan.reason
    assert control.decide(unknown(0.96)).kind == PLAIN, "it could not pay were it always right"
    assert control.decide(unknown(0.25, shadow_account=0.1)).kind == PLAIN


def test_a_first_trial_that_is_sure_is_taken_over_at_once_and_one_that_fails_is_paid_for() -> None:
    state = unknown(0.25, ledger=Ledger(request=Account(0.0, 20.0)))
    plan = control.decide(state)
    good = learning.observe(state, plan, Done(9, 3.2, ((0.999, True),) * 8, 8, 8, 2.0, 1.2))
    assert control.decide(good).kind == "E6"
    bad = learning.observe(state, plan, Done(1, 1.8, ((0.4, False),), 2, 2, 0.6, 1.2))
    assert control.decide(bad).kind == PLAIN
    earned = 1.8 * (state.rules.shadowing + state.rules.early_shadowing)
    assert bad.shadow_account == pytest.approx(state.shadow_account - 0.8 + earned)


def test_where_a_row_goes_next_to_all_is_known_and_where_many_come_nothing_of_times() -> None:
    state = graded(0.95)
    eight = replace(state, rows=8)
    seven, one = learning.resized(eight, 7), learning.resized(eight, 1)
    assert seven.rows == 7
    assert seven.costs.drafts == eight.costs.drafts
    assert seven.costs.plain.measurements == costs.LEAST_PLAIN - 1
    timed = learning.observe(seven, control.decide(seven), Done(1, 1.0))
    assert control.decide(timed).kind == "E6", "one plain step is enough"
    assert one.costs.plain.measurements == one.costs.drafts["E6"].measurements == 0
    assert one.drafters["E6"].calibration == eight.drafters["E6"].calibration


def test_copied_text_grades_no_recycled_tokens() -> None:
    """Lookups draft it: what a tree of recycled tokens would have had of it says nothing of the rest."""
    state = replace(state_with(ranks=Ranks()), current=None)
    copied = replace(control.decide(state), kind=LOOKUP, drafts=(24,))
    after = learning.observe(state, copied, Done(24, 2.0, verified=24, ranks=(0,) * 24))
    assert after.ranks == state.ranks
    plain = learning.observe(state, Plan(PLAIN, 1.0, None, ""), Done(1, 1.0, ranks=(0,), busy=(1, 1.0)))
    assert plain.ranks != state.ranks


def test_drafters_are_held_against_each_other_now_and_then_and_after_every_shadow() -> None:
    machine = MACHINES["nano"]
    state = replace(first_state(machine, ("E6", "E8")), position=100, shadow_account=1e9)
    for name, right in (("E6", 20), ("E8", 32)):
        state = learning.shadow(state, name, [0.9] * 32, [place < right for place in range(32)])
    fresh = replace(state, current="E6", chosen_at=state.position)
    assert control.decide(fresh).current == "E6"
    assert control.decide(replace(fresh, position=state.position + 16)).current == "E8"
    assert control.decide(learning.shadow(fresh, "E8", [0.9] * 32, [True] * 32)).current == "E8"


def test_a_tree_that_is_worth_nothing_any_more_does_not_draft() -> None:
    state = state_with(ranks=Ranks(tree=None), current=RECYCLE)
    assert control.decide(replace(state, chosen_at=state.position)).kind == PLAIN


def test_plain_steps_are_measured_now_and_then() -> None:
    state = replace(graded(0.95), probe_account=3.0, probed_at=0)
    plan = control.decide(state)
    assert (plan.kind, plan.steps) == (PROBE, control.PROBE_STEPS)
    after = learning.observe(state, plan, Done(4, 4.2, steps=4, warm=(2, 0.8)))
    assert after.probe_account == pytest.approx(3.0 - 4 * (1 - 1 / plan.price), abs=0.05)
    assert 0.8 < after.costs.plain.value < 0.95
    assert control.decide(after).kind == "E6"


def test_plain_steps_behind_a_draft_tell_nothing_of_plain_decoding_and_what_they_lose_counts() -> None:
    state = graded(0.95)
    plan = Plan(PLAIN, 1.0, "E6", "", steps=4)
    cold = learning.observe(state, plan, Done(2, 2.4, steps=2, warm=(0, 0.0)))
    assert cold.costs.plain == state.costs.plain
    assert cold.ledger.request.debt == pytest.approx(0.4)
    warm = learning.observe(state, plan, Done(4, 4.0, steps=4, warm=(2, 0.9)))
    assert warm.costs.plain.value < state.costs.plain.value
    assert warm.ledger.request.debt == pytest.approx(2 + (4.0 - 2 * 0.9) / warm.costs.plain.value - 4, abs=0.01)
    stalled = learning.observe(state, plan, Done(2, 20.0, steps=2, warm=(0, 0.0)))
    assert stalled.ledger.request.debt == pytest.approx(2 * (learning.MOST_COLD - 1))


def test_where_all_takes_longer_a_plain_step_is_measured_and_believed_and_costs_stay() -> None:
    state, slowed = replace(graded(0.95), probe_account=-0.5), 6
    known = state.costs
    for turn in range(slowed + 6):
        if (plan := control.decide(state)).kind == PROBE:
            break
        known, factor = state.costs if turn <= slowed else known, 1.0 if turn < slowed else 1.7
        drafting, scoring = factor * known.drafts["E6"](2), factor * known.scoring_of("E6")(3)
        state = learning.observe(state, plan, Done(3, drafting + scoring, ((0.9, True),) * 2, 2, 2, drafting, scoring))
    assert turn < slowed + 5, "a few steps tell"
    assert "longer" in plan.reason
    once = learning.observe(state, plan, Done(1, 1.7))
    assert once.costs.plain.value == pytest.approx(1.0), "a single one says nothing"
    again = control.decide(once)
    assert again.kind == PROBE
    for slower in (learning.observe(once, again, Done(1, 1.7)), learning.observe(state, plan, PROBED)):
        assert slower.costs.plain.value == pytest.approx(1.5, abs=0.25)
        assert slower.costs.drafts["E6"] == known.drafts["E6"], "as it was before the first slow step"
        assert slower.costs.scorings == known.scorings
        assert not slower.pace.changed
        assert slower.ledger.request.debt < state.ledger.request.debt, "less was lost than it seemed"
    same = learning.observe(state, plan, replace(PROBED, warm=(2, 1.02)))
    assert same.costs.plain.value == pytest.approx(1.0, abs=0.02), "then it is the drafter"
    assert same.costs.drafts["E6"] == state.costs.drafts["E6"]
    assert same.ledger.request.debt == pytest.approx(state.ledger.request.debt + learning.MOST_COLD * 2 - 2)
    assert not same.pace.changed


PROBED = Done(4, 7.0, steps=4, warm=(2, 1.7))
"""A probe where all takes 1.7 times as long."""


def test_a_probe_that_was_cut_short_measured_nothing() -> None:
    state = replace(graded(0.95), probe_account=3.0, probed_at=0)
    plan = control.decide(state)
    short = learning.observe(state, plan, Done(2, 2.4, steps=2, warm=(0, 0.0)))
    assert short.probed_at == state.probed_at
    assert learning.observe(state, plan, PROBED).probed_at == state.position


def test_a_probe_can_be_paid_at_any_rate_and_is_put_off_in_a_copied_passage() -> None:
    fast = replace(graded(0.95), probed_at=0, probe_account=learning.MOST_PROBING)
    rates = {"E6": replace(fast.drafters["E6"], rate=Rates(Rate(900.0, 100.0, 90.0), Rate(9000.0, 1000.0, 900.0)))}
    assert control.decide(replace(fast, drafters=rates)).kind == PROBE
    plain = replace(state_with(), current=None, probed_at=-200, lookups=Rate(80.0, 10.0))
    assert control.decide(plain, [0]).kind == PROBE, "what is plain anyway costs nothing"
    assert control.decide(plain, [16]).kind == LOOKUP


def test_the_pace_is_that_of_most_of_the_latest_plans() -> None:
    pace = Pace()
    for taken in (1.0, 3.0, 1.02):
        pace = pace.add(taken, 1.0)
    assert pace.factor == 1.02, "one stall says nothing"
    assert pace.steady
    later = pace.add(3.0, 1.0)
    assert later.factor == 3.0
    assert later.changed
    assert not Pace().add(3.0, 1.0).steady, "not even before much is known"


def test_another_number_of_rows_knows_nothing_of_the_pace_of_the_one_before() -> None:
    state = graded(0.95)
    state = replace(state, pace=Pace((1.7, 1.7, 1.7)), steady=Steady(state.costs, state.ledger, 0))
    for rows in (1, 2, 8):
        after = learning.resized(replace(state, rows=2), rows)
        assert (after.pace, after.steady) == (Pace(), None)


@pytest.mark.parametrize(
    ("slack", "lost", "steps"), [(0.0, 19.0, 32), (0.015, 19.0, 32), (0.015, 12.24, 16), (0.015, 12.01, 4)]
)
def test_as_many_plain_steps_are_decided_on_as_win_back_what_was_lost(slack: float, lost: float, steps: int) -> None:
    overdrawn = replace(graded(0.95), ledger=Ledger(slack, request=Account(lost, 0.0)))
    plan = control.decide(overdrawn)
    assert (plan.kind, plan.steps) == (PLAIN, steps)


def test_a_cost_that_rests_on_little_is_measured_again_soon() -> None:
    state = replace(graded(0.95), current=None, shadow_account=4.0)
    state = replace(state, drafters={"E6": replace(state.drafters["E6"], timed=state.position)})
    for measurements, wait in ((1, control.RETIMED_SOON), (30, control.RETIMED_AFTER)):
        timed = replace(state.costs, drafts={"E6": replace(state.costs.drafts["E6"], step=0.9, measurements=measurements)})
        for tokens in (wait, wait + 1):
            later = replace(state, costs=timed, position=state.position + tokens, chosen_at=state.position + tokens)
            assert control.decide(later).trial is (tokens > wait)


def test_a_request_forgets_half_of_the_last_ones() -> None:
    state = graded(0.95)
    after = learning.begin(state)
    assert after.drafters["E6"].rate.now.tokens == pytest.approx(Rules().kept * state.drafters["E6"].rate.now.tokens)
    assert after.drafters["E6"].rate.usual == state.drafters["E6"].rate.usual
    assert after.drafters["E6"].calibration == state.drafters["E6"].calibration


def worths(state: State, match: int, price_of_length: float) -> list[float]:
    chances, worth = state.matches.predict(match), []
    for count in range(len(chances) + 1):
        worth.append(sum(_products(chances[:count])) - price_of_length * state.costs.scoring(count + 1))
    return worth


def _products(chances: list[float]) -> list[float]:
    found, product = [], 1.0
    for one in chances:
        found.append(product := product * one)
    return found


@pytest.mark.parametrize("match", [1, 3, 10])
@pytest.mark.parametrize("rate", [1.0, 2.4])
def test_the_length_of_a_lookup_is_the_best_at_the_rate_of_lookups(match: int, rate: float) -> None:
    state = state_with(lookups=Rate(rate * 10, 10.0))
    plan = control.decide(state, [match])
    worth = worths(state, match, rate)
    best = max(range(len(worth)), key=worth.__getitem__)
    if plan.kind == LOOKUP:
        assert worth[plan.drafts[0]] == pytest.approx(worth[best])
    else:
        gain = sum(_products(state.matches.predict(match)[:best]))
        assert best == 0 or gain <= state.costs.scoring(best + 1) - 1 + state.costs.fixed + state.costs.lookup


def test_a_batch_looks_up_for_the_rows_that_have_a_match() -> None:
    plan = control.decide(state_with(), [10, 0, 0])
    assert plan.kind == LOOKUP
    assert plan.drafts[0] > 2
    assert plan.drafts[1:] == (0, 0)
    shorter = control.decide(state_with(), [10, 10, 10])
    assert 0 < shorter.drafts[0] <= plan.drafts[0]
    assert len(set(shorter.drafts)) == 1


def test_a_drafter_that_is_unsure_is_looked_at_again_and_drafts_when_it_is_right() -> None:
    state = replace(graded(0.95), shadow_account=1e9)
    plan = control.decide(state)
    assert plan.kind == "E6"
    while (plan := control.decide(state)).kind == "E6" or plan.kind == PROBE:
        state = learning.observe(state, plan, Done(1, 1.2 if plan.kind == "E6" else 1.0, ((0.9, False),), 1, 1, 0.25, 0.95))
    state, began = replace(state, ledger=replace(state.ledger, request=type(state.ledger.request)())), state.position
    while control.decide(state).kind != "E6":
        if control.due(state) == "E6":
            state = learning.shadow(state, "E6", [0.9] * 32, [True] * 32, 0.1)
        state = learning.observe(state, control.decide(state), Done(1, 1.0))
        state = replace(state, shadow_account=1e9)
        assert state.position - began < 1500
