"""How drafters that do not draft are looked at, that what learning takes is counted, and what a draft may lose."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skipstone.control import control, learning
from skipstone.control.control import DEAR, LOOK_STEPS, MOST_LOOK_STEPS, TRIED, TRIED_ON
from skipstone.control.costs import GAIN, Cost, Costs, Line
from skipstone.control.ledger import REQUEST_CREDIT, Account, Ledger
from skipstone.control.price import RankTree
from skipstone.control.state import LOOKUP, PLAIN, PROBE, RECYCLE, Done, Drafter, Plan, Rate, Rates, State


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
    assert (plan.kind, plan.trial) == ("int4", True)
    assert "looked at" in plan.reason


@pytest.mark.parametrize(
    ("account", "steps", "of_slow"), [(0.5, 4, LOOK_STEPS), (0.7, 5, LOOK_STEPS), (3.0, MOST_LOOK_STEPS, 7)]
)
def test_a_look_is_as_long_as_what_was_saved_pays_for(account: float, steps: int, of_slow: int) -> None:
    """Four drafts and their scoring take .1 + 4 x .3 + 1.16 plain steps. Of these a look is thought to lose a twentieth at
    least, and a sixth where the drafter has .84 of plain decoding's speed. The first one finds other weights in the caches, so
    that nobody looks for less than two."""
    one = replace(state(DEAR, shadow_account=account), costs=replace(state(DEAR).costs, drafts={"int4": Line(0.3, 0.1, 30)}))
    plan = without_current(one)
    assert plan is not None
    assert plan.steps == steps
    slow = Rates(Rate(8.0, 10.0, 5.0, 400), Rate(8.0, 10.0, 5.0, 400))
    slower = without_current(replace(one, drafters={"int4": replace(one.drafters["int4"], rate=slow)}))
    assert slower is not None
    assert slower.steps == of_slow


def test_where_nothing_drafts_what_may_be_fastest_is_looked_at_and_where_one_does_all_are_in_turn() -> None:
    """ "near" was looked at 100 tokens ago, "far" 300."""
    one = state(DEAR, shadow_account=2.0)
    near = replace(one.drafters["int4"], rate=Rates(Rate(9.9, 10.0, 6.0, 300), Rate(9.9, 10.0, 6.0, 300)), seen=300)
    far = replace(one.drafters["int4"], rate=Rates(Rate(6.0, 10.0, 6.0, 100), Rate(6.0, 10.0, 6.0, 100)), seen=100)
    costs = replace(
        one.costs,
        drafts=dict.fromkeys(("near", "far"), one.costs.drafts["int4"]),
        shadows=dict.fromkeys(("near", "far"), one.costs.shadows["int4"]),
    )
    one = replace(one, costs=costs, drafters={"near": near, "far": far})
    plain, drafting = without_current(one), control._look_by_drafting(one, "int4", 1.0)
    assert plain is not None
    assert drafting is not None
    assert (plain.kind, drafting.kind) == ("near", "far")
    long_ago = replace(far, seen=400 - one.rules.look_again)
    forgotten = without_current(replace(one, drafters={"near": near, "far": long_ago}))
    assert forgotten is not None
    assert forgotten.kind == "far", "after so long whatever its rate was"


@pytest.mark.parametrize(("current", "saved"), [(None, 1.5), ("E6", 0.0)])
def test_what_a_look_wins_pays_for_further_ones_where_nothing_else_drafts(current: str | None, saved: float) -> None:
    rules = replace(state(DEAR).rules, shadowing=0.0, early_shadowing=0.0)
    ledger = Ledger(overall=Account(-50.0, 100.0), request=Account(-50.0, 100.0))
    before = replace(state(DEAR), ledger=ledger, shadow_account=0.0, current=current, rules=rules)
    look = Plan("int4", 1.0, current, "", thresholds=TRIED_ON, trial=True)
    assert learning.observe(before, look, Done(4, 2.5, verified=4)).shadow_account == pytest.approx(saved)
    assert learning.observe(before, look, Done(1, 2.5, verified=4)).shadow_account == pytest.approx(-1.5)


LOOK = Plan("int4", 1.0, None, "", thresholds=TRIED_ON, trial=True, steps=MOST_LOOK_STEPS)


def stake(drafts: int) -> float:
    """Plain steps that so many drafts lose where none of them is right."""
    costs = state(1.0).costs
    return costs.drafts["int4"](drafts) + costs.scoring_of("int4")(drafts + 1) + costs.fixed - 1


def test_a_look_ends_where_it_has_paid_what_was_saved_but_not_after_one_step() -> None:
    rich = replace(with_room(50.0), shadow_account=1.0)
    assert control.further(rich, LOOK, LOOK_STEPS, 0.9, 0.9) == LOOK
    assert control.further(rich, LOOK, LOOK_STEPS, 0.9, 1.1) is None
    assert control.further(rich, LOOK, LOOK_STEPS - 1, 1.1, 1.1) == LOOK, "the first one finds cold caches"


@pytest.mark.parametrize("drafts", range(TRIED, len(TRIED_ON) + 1))
def test_what_is_left_of_a_look_drafts_no_further_than_what_is_left_to_lose_pays_for(drafts: int) -> None:
    lost = 0.7
    enough = replace(with_room(lost + stake(drafts) + 1e-9), shadow_account=4.0)
    after = control.further(enough, LOOK, 1, lost, lost)
    assert after is not None
    assert after.thresholds == TRIED_ON[:drafts]
    less = control.further(replace(with_room(lost + stake(drafts) - 1e-3), shadow_account=4.0), LOOK, 1, lost, lost)
    assert (None if less is None else len(less.thresholds)) == (drafts - 1 if drafts > TRIED else None)


def test_a_trial_that_had_to_be_shorter_than_one_that_tells_waits_and_all_else_goes_on() -> None:
    less = with_room(stake(TRIED) - 1e-3)
    assert len(affordable(stake(TRIED) + 1e-9, LOOK).thresholds) == TRIED
    assert control._affordable(less, LOOK) is None
    assert len(affordable(stake(TRIED) - 1e-3, replace(LOOK, trial=False)).thresholds) == TRIED - 1
    looked_up = Plan(LOOKUP, 1.0, None, "", drafts=(TRIED,), trial=True)
    assert control._affordable(with_room(0.01), looked_up) is None
    drafting = replace(less, current="int4", shadow_account=4.0, chosen_at=400)
    untimed = {**drafting.costs.drafts, "other": Line(0.3)}
    both = {**drafting.drafters, "other": Drafter()}
    drafting = replace(drafting, drafters=both, costs=replace(drafting.costs, drafts=untimed))
    assert control._wanted(drafting, ()).kind == "other", "it would be tried"
    assert control.decide(drafting).kind == "int4"


@pytest.mark.parametrize(
    ("shadow", "account", "written", "steps"),
    [(1.0, 0.5, 500.0, 128), (1.0, 1.5, 500.0, 32), (1.0, 0.5, 10.0, 32), (DEAR, 4.0, 10.0, 128)],
)
def test_where_nothing_pays_a_plan_ends_where_a_shadow_could_be_cast(
    shadow: float, account: float, written: float, steps: int
) -> None:
    """One that can be paid, or might be by the time that a text is long enough; a dear one is never cast."""
    ledger = Ledger(overall=Account(-50.0, 500.0), request=Account(0.0, written))
    one = replace(state(shadow), ledger=ledger, shadow_account=account, position=4000)
    assert control._plain_steps(one) == steps


@pytest.mark.parametrize(("fixed", "steps"), [(0.001, 4), (0.105, 11), (3.0, 32)])
def test_plain_steps_are_decided_on_for_so_long_that_deciding_takes_a_hundredth(fixed: float, steps: int) -> None:
    """While a drafter waits for what was lost to be won back."""
    one = with_room(-0.001)
    plan = control.decide(replace(one, current="int4", costs=replace(one.costs, fixed=fixed)))
    assert (plan.kind, plan.steps) == (PLAIN, steps)


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


def with_room(room: float) -> State:
    """So many plain steps may still be lost."""
    return replace(state(1.0), ledger=Ledger(overall=Account(-50.0, 100.0), request=Account(REQUEST_CREDIT - room, 0.0)))


@pytest.mark.parametrize("room", [0.2, 0.8, 1.5, 3.0])
def test_a_draft_is_no_longer_than_what_may_be_lost_pays_for(room: float) -> None:
    before = with_room(room)
    assert before.ledger.room == pytest.approx(room)
    plan = control._affordable(before, Plan("int4", 1.0, "int4", "", thresholds=(0.1,) * 16, beside=(0.1,) * 16))
    assert plan is not None
    kept = len(plan.thresholds)
    assert kept < 16
    assert len(plan.beside) == kept
    assert stake(kept + 1) > room
    assert (plan.kind, stake(kept) <= room) == ("int4", True) if kept else plan.kind == PLAIN


def affordable(room: float, plan: Plan) -> Plan:
    found = control._affordable(with_room(room), plan)
    assert found is not None
    return found


def test_what_is_looked_up_or_recycled_is_held_against_it_as_well() -> None:
    costs, lookup = state(1.0).costs, Plan(LOOKUP, 1.0, None, "", drafts=(20, 4))
    one_each = costs.scoring(2) + costs.fixed + costs.lookup - 1
    assert control._affordable(with_room(11.0), lookup) == lookup
    assert affordable(one_each + 1e-9, lookup).drafts == (1, 1), "the longest ones are cut"
    assert affordable(0.0, lookup).kind == PLAIN
    tree = Plan(RECYCLE, 1.0, None, "", tree=RankTree((-1, 0, 0), (0, 0, 1), 2.0))
    lost = costs.scoring(4) + costs.fixed - 1
    assert affordable(lost + 1e-9, tree) == tree
    assert affordable(lost - 1e-3, tree).kind == PLAIN
    probe = Plan(PROBE, 1.0, None, "")
    assert control._affordable(with_room(-1.0), probe) == probe


def test_it_drafts_as_far_as_it_wants_where_much_was_won() -> None:
    rich = replace(with_room(50.0), shadow_account=0.0, probe_account=-9.0, current="int4")
    assert control.decide(rich) == control._wanted(rich, ())


def lost(done: Done) -> float:
    """Plain steps that plain ones count as lost."""
    before = replace(state(1.0), ledger=Ledger())
    return learning.observe(before, Plan(PLAIN, 1.0, None, ""), done).ledger.overall.debt


def test_one_busy_step_does_not_let_the_plain_ones_of_its_plan_count_by_their_seconds() -> None:
    noisy = 31 * 1.4  # other processes compute now and then: many steps take longer, the median does not
    assert lost(Done(32, noisy + 1.2, steps=32, busy=(1, 1.2), warm=(31, 1.0))) == pytest.approx(0.2)
    assert lost(Done(32, noisy + 9.0, steps=32, busy=(1, 9.0), warm=(31, 1.0))) == pytest.approx(0.5), "at most half a step"
    assert lost(Done(2, 2.6, steps=2, busy=(2, 2.6), warm=(0, 0.0))) == pytest.approx(0.6)


def test_plain_steps_behind_a_prompt_lose_nothing_and_behind_a_draft_they_do() -> None:
    behind_draft = Done(4, 5.0, steps=4, warm=(2, 1.0))
    assert lost(behind_draft) == pytest.approx(1.0)
    assert lost(replace(behind_draft, behind_prompt=True)) == 0.0


def test_a_step_in_which_the_engine_prepared_teaches_nothing_of_times_and_loses_no_more_than_was_thought() -> None:
    plan, done = Plan("int4", 1.0, "int4", ""), Done(4, 3.0, verified=3, passes=3, drafting=0.9, scoring=1.8)
    before = replace(state(1.0), ledger=Ledger(request=Account(0.0, 9.0)))
    expected = before.costs.drafts["int4"](3) + before.costs.scoring_of("int4")(4)
    slow = replace(done, seconds=900.0, drafting=400.0, scoring=500.0, preparing=True)
    after = learning.observe(before, plan, slow)
    assert after.costs == before.costs
    assert after.pace == before.pace
    assert after.drafters["int4"].timed == before.drafters["int4"].timed, "it is timed once more"
    assert after.ledger.overall.debt == pytest.approx(max(expected, 1.0) - 4)
    assert learning.observe(before, plan, replace(slow, preparing=False)).costs != before.costs, "others do teach"
