"""Which drafter, how far, or none: decisions that can be worked out by hand."""

from copy import deepcopy
from dataclasses import replace

import pytest

from skipstone.policy import choose_drafter as choose
from skipstone.policy.choose_drafter import LOOKUP, PLAIN, PROBE, RECYCLE, Decision, DrafterState, Policy, Rate, StepResult
from skipstone.policy.cost_model import HOST, LearnedCosts, LineTime, MeanTime, ScoringTime
from skipstone.policy.draft_length import RankTree


def timed(step: float = 0.2, **more: object) -> Policy:
    """Plain decoding and a chain "a" that were timed for long, scoring 1 + .01 (n - 1), nothing left to explore."""
    scoring = ScoringTime()
    for _ in range(9):
        for n in (2, 5, 9, 17):
            scoring.observe(n, 1 + 0.01 * (n - 1))
    line = LineTime(0.0, step)
    for turn in range(99):
        line.observe(1 + turn % 4, step * (1 + turn % 4))
    costs = LearnedCosts(
        MeanTime(1.0, 4), 0.0, {"a": line}, {HOST: scoring, "a": deepcopy(scoring)}, timed_at={"a": 0, HOST: 0}
    )
    costs.scoring["a"].line.measurements = 99
    policy = Policy(costs, {"a": DrafterState(seen_at=0)}, exploration=0.0, position=64, probed_at=64, starts_request=False)
    for name, value in more.items():
        setattr(policy, name, value)
    return policy


def drafted(policy: Policy, tokens: float, drafts: int) -> StepResult:
    """A step of "a" that takes the expected time."""
    drafting, scoring = policy.costs.drafting["a"](drafts), policy.costs.scoring_of("a")(drafts + 1)
    judged = [(0.9, place + 1 < tokens) for place in range(min(round(tokens), drafts))]
    return StepResult(tokens, drafting + scoring, 1, drafts, drafts, drafting, scoring, 0.0, judged)


def plain(steps: int) -> StepResult:
    return StepResult(steps, steps, steps, warm_steps=steps, warm_seconds=1.0)


def won(tokens: float, time: float, steps: float = 60.0) -> Rate:
    return Rate(tokens, time, steps, 64)


def test_plain_decoding_is_timed_first() -> None:
    policy = Policy(LearnedCosts(MeanTime(9.0)), {})
    for seconds in (0.02, 0.03, 0.025):
        assert not policy.is_timed
        policy.observe(Decision(PLAIN), [StepResult(1.0, seconds)])
    assert (policy.is_timed, policy.costs.plain.value) == (True, pytest.approx(0.025))


def test_the_first_steps_of_a_process_do_not_time_plain_decoding_while_they_become_faster() -> None:
    policy = Policy(LearnedCosts(MeanTime(9.0)), {})
    for seconds in (0.03, 0.02, 0.018, 0.015, 0.016, 0.0155):
        assert not policy.is_timed
        policy.observe(Decision(PLAIN), [StepResult(1.0, seconds)])
    assert (policy.is_timed, policy.costs.plain.value) == (True, pytest.approx(0.0155))


def test_the_drafter_with_the_best_rate_drafts_as_long_as_that_pays() -> None:
    """A further draft with survival S gains A S tokens for .21 plain steps."""
    policy = timed()
    policy.drafters["a"].rate = won(90.0, 60.0)
    policy._set_thresholds("a")
    decision = policy.decide()
    assert (decision.kind, decision.current) == ("a", "a")
    mean = policy.drafters["a"].acceptance.mean
    assert decision.price == pytest.approx((90 + 8) / 68)
    assert decision.thresholds[1] == pytest.approx(decision.price * 0.21 / mean, rel=0.02)
    assert decision.thresholds[0] == pytest.approx(0.21 / mean, rel=0.02), "to draft at all is held against a plain step"
    assert decision.steps == int(4.0 / decision.stake), "six steps of so many drafts may lose more than the budget has"
    policy.budget.overall = policy.budget.request = 1e9
    assert (decision := policy.decide()).steps == choose.STEPS_AT_ONCE
    assert policy.stands(decision, [0])
    assert not policy.stands(decision, [10]), "a lookup of such a match is worth more"


def test_another_drafter_takes_over_if_it_is_faster_by_the_margin() -> None:
    policy = timed()
    policy.drafters["b"] = DrafterState(seen_at=64)
    policy.costs.drafting["b"], policy.costs.timed_at["b"] = LineTime(0.0, 0.2, 99), 64
    policy.drafters["a"].rate, policy.current = won(900.0, 600.0), "a"
    for rate, best in ((won(910.0, 600.0), "a"), (won(930.0, 600.0), "b")):
        policy.drafters["b"].rate = rate
        assert policy.decide().current == best
    policy.chosen_at = policy.position - choose.CHOOSE_EVERY + 1
    assert policy.decide().current == "a", "not before so many tokens have passed"
    policy.drafters["a"].rate, policy.drafters["b"].rate, policy.chosen_at = won(500.0, 600.0), won(500.0, 600.0), None
    assert policy.decide().current is None


def test_a_drafter_that_is_right_too_seldom_rests_and_loses_its_rate() -> None:
    policy = timed(step=0.5, current="a")
    policy.drafters["a"].rate = won(70.0, 60.0)
    policy.drafters["a"].acceptance.mean = 0.3
    policy._set_thresholds("a")
    decision = policy.decide()
    assert (decision.kind, decision.current) == (PLAIN, "a")
    before = policy.drafters["a"].rate.value
    policy.observe(decision, [plain(4)])
    assert 1 < policy.drafters["a"].rate.value < before


@pytest.mark.parametrize("match", [1, 3, 10])
@pytest.mark.parametrize("price", [1.0, 2.4])
def test_the_length_of_a_lookup_is_the_best_one(match: int, price: float) -> None:
    """And there is none if the current drafter gains more in the same time."""
    policy = timed(current="a", chosen_at=64)
    policy.budget.overall = policy.budget.request = 1e9
    policy.drafters["a"].rate = won(800.0 * price, 800.0)
    price = policy.drafters["a"].rate.value

    def worth(drafts: int) -> float:
        survivals = policy.matches.predict(match, 24)[:drafts]
        return 1 + sum(survivals) - price * policy.costs.scoring_of(HOST)(drafts + 1)

    decision = policy.decide([match])
    best = max(map(worth, range(25)))
    assert (decision.kind == LOOKUP) is (best > 0)
    if decision.kind == LOOKUP:
        assert worth(decision.drafts[0]) == pytest.approx(best)


def test_a_batch_looks_up_for_the_rows_that_have_a_match() -> None:
    policy = timed()
    policy.budget.overall = policy.budget.request = 1e9
    decision = policy.decide([10, 0, 0])
    assert decision.kind == LOOKUP
    assert decision.drafts[0] > 2
    assert decision.drafts[1:] == (0, 0)
    assert len(set(policy.decide([10, 10, 10]).drafts)) == 1


def test_recycled_tokens_are_graded_by_what_is_committed_and_draft_if_that_pays() -> None:
    policy = timed()
    policy.drafters[RECYCLE] = DrafterState()
    for _ in range(40):
        decision = policy.decide()
        if decision.kind == RECYCLE:
            break
        policy.observe(decision, [replace(plain(8), ranks=[0] * 8)])
    assert decision.kind == RECYCLE
    assert decision.tree is not None
    assert policy.drafters[RECYCLE].rate.value > 1.2
    before = policy.drafters[RECYCLE].rate.tokens
    copied = Decision(LOOKUP, drafts=(24,))
    policy.observe(copied, [StepResult(24.0, 2.0, drafts=24, scoring=1.5, ranks=[0] * 24)])
    assert policy.drafters[RECYCLE].rate.tokens <= before, "copied text grades nobody else"


def test_a_trial_is_three_steps_of_which_the_last_is_timed_and_ends_at_once_if_it_fails_badly() -> None:
    """The first steps find cold caches. Their time counts in the drafter's rate and in the accounts."""
    for times, after in (((2.2, 2.0, 1.7), 0.68), ((41.0,), 39.98)):
        policy = timed(exploration=4.0)
        policy.costs.timed_at.pop("a")
        policy.costs.drafting["a"] = LineTime(0.0, 0.25)
        assert replace(policy, exploration=0.1).decide().kind == PLAIN, "the account cannot pay"
        for seconds in times:
            decision = policy.decide()
            assert (decision.kind, decision.explores, decision.steps) == ("a", True, 1)
            assert len(decision.thresholds) >= 2
            assert policy.costs.drafting["a"].measurements == 0
            judged = [(0.9, True), (0.9, False)]
            policy.observe(decision, [StepResult(2.0, seconds, 1, 2, 2, seconds - 1.02, 1.02, 0.0, judged)])
        assert policy.costs.drafting["a"](2) == pytest.approx(after)
        assert policy.trial is None
        assert policy.drafters["a"].rate.steps == pytest.approx(len(times), rel=0.01)


def test_the_first_steps_of_a_known_drafter_in_a_process_are_not_timed() -> None:
    """A mapped copy of the weights comes into memory in its first step."""
    policy = timed(current="a", exploration=0.0)
    policy.costs.timed_at.pop("a")
    policy.costs.drafting["a"] = LineTime(0.0, 0.25)
    for drafting, is_timed in ((3.0, False), (0.8, False), (0.6, True)):
        policy.observe(Decision("a", thresholds=(0.0,)), [StepResult(2.0, drafting + 1.02, 1, 1, 1, drafting, 1.02)])
        assert ("a" in policy.costs.timed_at) == is_timed
    assert policy.costs.drafting["a"](1) < 0.7


def test_a_drafter_is_replayed_and_decodes_the_text_virtually() -> None:
    """32 right tokens, all sure: chains of 8 drafts at .2 each, so nine tokens in 2.68 plain steps."""
    policy = timed(exploration=4.0, position=200, probed_at=200)
    policy.costs.replays["a"] = MeanTime(0.1, 4)
    assert policy.next_replay({}) == "a"
    policy.drafters["a"].acceptance.slope, policy.drafters["a"].acceptance.offset = 1.0, 4.0
    before = policy.exploration
    policy.observe_replay("a", [0.99] * 36, [True] * 36, 0.1)
    assert policy.drafters["a"].rate.tokens >= 36
    assert policy.drafters["a"].rate.value > 1.5
    assert policy.exploration == pytest.approx(before - 0.1)
    assert policy.budget.remaining == pytest.approx(4.0 - 0.1)
    assert policy.decide().current == "a", "drafters are held against each other at once"
    assert policy.next_replay({}) is None, "the one that drafts is graded by what it does"
    rate = replace(policy.drafters["a"].rate)
    policy.observe_replay("a", [], [], 0.3, read=96)
    assert policy.drafters["a"].rate == rate
    assert policy.exploration == pytest.approx(before - 0.4), "a replay without a result is paid, too"
    assert policy.costs.replays["a"].value == pytest.approx(0.1), "three windows took .1 each"


def test_a_drafter_with_an_expensive_replay_is_tried_instead() -> None:
    policy = timed(exploration=4.0, position=200, probed_at=200)
    policy.costs.replays["a"] = MeanTime(2.0, 4)
    assert policy.next_replay({}) is None
    assert policy.decide().kind == "a"
    policy.drafters["a"].searches = True
    assert policy.next_replay({}) == "a"


def test_a_cost_is_measured_again_after_long_if_it_may_matter() -> None:
    policy = timed(step=0.6, exploration=4.0)
    policy.drafters["a"].acceptance.mean = 0.7
    for passed, tried in ((900, False), (1100, True)):
        policy.position = policy.probed_at = policy.drafters["a"].seen_at = passed
        assert (policy.decide().kind == "a") is tried
    policy.drafters["a"].acceptance.mean = 0.05
    assert policy.decide().kind == PLAIN, "it could not pay were it twice as cheap"


def test_plain_steps_are_measured_now_and_then() -> None:
    policy = timed(exploration=4.0, current="a", chosen_at=64)
    policy.drafters["a"].rate = won(90.0, 60.0)
    policy.position, policy.chosen_at = 64 + choose.PLAIN_AT_ONCE + 1, None
    decision = policy.decide()
    assert (decision.kind, decision.steps) == (PROBE, choose.PROBE_STEPS)
    policy.observe(decision, [StepResult(4.0, 4.3, 4, warm_steps=2, warm_seconds=0.9)])
    assert policy.costs.plain.value == pytest.approx(1.0 - 0.1 / 4)
    assert policy.budget.remaining == pytest.approx(4 + 4 * 0.015 - min((4.3 - 1.8) / 1.0 - 2, 1.0))


def surprise(policy: Policy, factor: float) -> None:
    """Two steps of "a" in a row take so many times as long as expected."""
    policy.drafters["a"].rate = won(90.0, 60.0)
    policy._set_thresholds("a")
    policy.budget.overall, policy.probed_at = 30.0, 0
    for _ in range(2):
        decision = policy.decide()
        assert decision.kind == "a"
        usual = drafted(policy, 3.0, 2)
        longer = {name: factor * getattr(usual, name) for name in ("seconds", "drafting", "scoring")}
        policy.observe(decision, [replace(usual, **longer)])


def test_one_surprise_at_a_time_causes_no_probe() -> None:
    policy = timed()
    surprise(policy, 1.0)
    for factor in (3.0, 1.0, 3.0, 0.4):
        decision = policy.decide()
        usual = drafted(policy, 3.0, 2)
        policy.observe(decision, [usual])
        policy.observe(decision, [replace(usual, seconds=factor * usual.seconds)])
        policy.observe(decision, [usual])
        assert (decision.kind, policy.surprises) == ("a", 0)


@pytest.mark.parametrize("factor", [1.7, 0.55])
def test_where_the_whole_machine_changes_a_plain_step_says_so_and_costs_stay(factor: float) -> None:
    policy = timed()
    surprise(policy, factor)
    decision = policy.decide()
    assert decision.kind == PROBE
    assert "longer" in decision.reason
    before = policy.costs.drafting["a"].step
    policy.observe(decision, [StepResult(4.0, 4.4 * factor, 4, warm_steps=2, warm_seconds=factor)])
    assert policy.costs.plain.value == pytest.approx(factor)
    assert policy.surprises == 0
    assert policy.costs.drafting["a"].step == pytest.approx(before)
    assert before == pytest.approx(0.2, rel=0.05), "at most one surprising time was learnt from, and damped"


def test_where_only_the_drafter_changes_its_costs_are_doubted() -> None:
    policy = timed()
    surprise(policy, 3.0)
    policy.observe(policy.decide(), [StepResult(4.0, 4.4, 4, warm_steps=2, warm_seconds=1.0)])
    assert policy.costs.plain.value == pytest.approx(1.0)
    decision = Decision("a", thresholds=(0.0, 0.0), current="a")
    policy.observe(decision, [StepResult(1.0, 4.86, 1, 2, 2, 1.8, 3.06, 0.0, [(0.9, False)])])
    assert policy.costs.drafting["a"](2) == pytest.approx(1.8), "the next time replaces what was believed"
    assert policy.costs.scoring_of("a")(3) == pytest.approx(3.06, rel=0.01)


def test_compiling_is_charged_as_expected_and_teaches_no_times_one_stall_twice_and_others_in_full() -> None:
    policy = timed()
    surprise(policy, 1.0)
    decision, learned = policy.decide(), policy.costs.drafting["a"].step
    policy.budget.overall = policy.budget.request = 0.0
    usual = drafted(policy, 1.0, 2)
    compiling = replace(usual, seconds=900.0, drafting=300.0, scoring=600.0, preparing=True)
    stall = replace(usual, seconds=12.0)
    for result, charged in ((compiling, usual.seconds), (stall, 2 * usual.seconds), (stall, 12.0)):
        before = policy.budget.remaining
        policy.observe(decision, [result])
        assert before + 1.015 - policy.budget.remaining == pytest.approx(charged)
        if result.preparing:
            assert (policy.costs.drafting["a"].step, policy.surprises) == (learned, 0)


def test_a_request_begins_with_half_of_the_rates_of_earlier_ones() -> None:
    policy = timed()
    policy.drafters["a"].rate = won(90.0, 60.0)
    policy.budget.charge(9.0, 1.0)
    policy.begin_request()
    assert policy.drafters["a"].rate.tokens == 45
    assert (policy.budget.request, policy.budget.remaining) == (12.0, pytest.approx(4 - 8 + 0.015))


def test_the_scoring_of_lookups_is_timed_even_if_it_is_believed_to_be_too_expensive() -> None:
    policy = timed(exploration=2.0)
    policy.costs.scoring[HOST] = ScoringTime(LineTime(4.0, 0.1, 30))
    policy.costs.scoring[HOST].draw()
    policy.costs.timed_at.pop(HOST)
    decision = policy.decide([9])
    assert (decision.kind, decision.explores, decision.drafts) == (LOOKUP, True, (2,))
    policy.observe(decision, [StepResult(3.0, 1.05, drafts=2, scoring=1.02, matches=[(9, 2, 3)])])
    assert policy.costs.scoring[HOST](3) == pytest.approx(1.02)
    policy.drafters[RECYCLE] = DrafterState()
    policy.costs.timed_at.pop(HOST)
    recycled = policy.decide()
    assert (recycled.kind, recycled.explores) == (RECYCLE, True)
    assert recycled.tree == RankTree((-1, 0), (0, 0))
