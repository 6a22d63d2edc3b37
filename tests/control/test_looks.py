"""How drafters that do not draft are looked at, and that what learning takes is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skipstone.control import control, learning
from skipstone.control.control import DEAR, LOOK_STEPS
from skipstone.control.costs import GAIN, Cost, Costs, Line
from skipstone.control.state import PLAIN, Done, Drafter, Plan, Rate, Rates, State


def state(shadow: float, **more: object) -> State:
    """One drafter, timed and graded once, and not looked at for 300 tokens. shadow: plain steps that its shadow takes."""
    seen = Rates(Rate(24.0, 20.0, 10.0, 100), Rate(24.0, 20.0, 10.0, 100))
    costs = Costs(plain=Cost(1.0, 3), drafts={"int4": Line(0.3, measurements=30)}, shadows={"int4": Cost(shadow, 2)})
    drafter = Drafter(rate=seen, seen=100, timed=390, searches=bool(more.pop("searches", False)))
    return State(costs, {"int4": drafter}, position=400, probed_at=400, chosen_at=400, **more)  # type: ignore[arg-type]


def without_current(one: State) -> Plan | None:
    return control._look_by_drafting(one, None, 1.0)


def test_a_drafter_whose_shadow_is_dear_drafts_to_be_known_and_casts_none() -> None:
    cheap, dear = state(DEAR - 0.1), state(DEAR)
    assert control.due(cheap) == "int4"
    assert without_current(cheap) is None
    assert control.due(dear) is None
    plan = without_current(dear)
    assert plan is not None
    assert (plan.kind, plan.trial, plan.steps) == ("int4", True, LOOK_STEPS)
    assert "looked at" in plan.reason


def test_a_search_goes_on_by_shadows_however_dear() -> None:
    searching = state(4 * DEAR, searches=True, shadow_account=4.0)
    assert control.due(searching) == "int4"
    assert without_current(searching) is None


def test_no_look_where_it_cannot_be_paid_or_was_taken_of_late_or_cannot_be_the_best() -> None:
    assert without_current(state(DEAR, shadow_account=0.1)) is None
    fresh = state(DEAR)
    late = replace(fresh, drafters={"int4": replace(fresh.drafters["int4"], seen=390)})
    assert without_current(late) is None
    slow = Rates(Rate(10.0, 100.0, 50.0, 400), Rate(10.0, 100.0, 50.0, 400))
    assert without_current(replace(fresh, drafters={"int4": replace(fresh.drafters["int4"], rate=slow)})) is None
    assert control._look_by_drafting(fresh, "int4", 1.0) is None, "the one that drafts is graded by what it does"
    assert control._look_by_drafting(replace(fresh, shadow_account=0.6), None, 3.0) is None, (
        "it would lose what another one wins"
    )


def test_more_is_looked_at_early() -> None:
    def earned(position: int) -> float:
        before = replace(state(1.0), position=position, shadow_account=0.0, moved_at=position)
        return learning.observe(before, Plan(PLAIN, 1.0, None, ""), Done(1, 1.0)).shadow_account

    rules = state(1.0).rules
    assert earned(0) == pytest.approx(rules.shadowing + rules.early_shadowing)
    assert earned(rules.early) == pytest.approx(rules.shadowing + rules.early_shadowing / 2)
    assert earned(100 * rules.early) == pytest.approx(rules.shadowing, rel=0.03)


def test_what_learning_takes_is_part_of_what_a_draft_costs() -> None:
    before = state(1.0)
    plan = Plan("int4", 1.0, "int4", "")
    done = Done(4, 3.0, verified=3, passes=3, drafting=0.9, scoring=1.8, learning_seconds=0.3)
    after = learning.observe(before, plan, done)
    assert after.costs.fixed == pytest.approx(before.costs.fixed + GAIN * (0.3 - before.costs.fixed))
    several = learning.observe(before, plan, replace(done, steps=3))
    assert several.costs.fixed == pytest.approx(before.costs.fixed + GAIN * (0.1 - before.costs.fixed))
