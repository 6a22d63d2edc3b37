"""The bound of the regret budget: of the accounts alone, and of the whole policy against adversarial drafters."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipstone.policy.choose_drafter import (
    COLD_LOSS,
    COLD_STEPS,
    HALF_LIFE,
    LOOKUP,
    PLAIN,
    PROBE,
    RECYCLE,
    Decision,
    DrafterState,
    Policy,
    StepResult,
)
from skipstone.policy.cost_model import LearnedCosts, LineTime, MeanTime
from skipstone.policy.regret_budget import CREDIT, MAX_BALANCE, REQUEST_CREDIT, RegretBudget
from tests.helpers.simulated_policy import together

step = st.tuples(st.floats(0.01, 60.0), st.integers(1, 12))  # plain steps that a drafting step takes, tokens that it commits
requests = st.lists(st.lists(step, min_size=1, max_size=80), min_size=1, max_size=6)


@given(requests, st.floats(0.0, 0.1))
def test_nobody_can_lose_more_than_the_budget_allows(given_requests: list[list[tuple[float, int]]], slack: float) -> None:
    """Each step is taken if `remaining` covers its time; otherwise a plain one is."""
    budget, time, tokens = RegretBudget(slack), 0.0, 0
    for request in given_requests:
        budget.begin_request()
        request_time, request_tokens = 0.0, 0
        for cost, committed in request:
            if cost - 1 > budget.remaining:
                cost, committed = 1.0, 1
            budget.charge(cost, committed)
            request_time, request_tokens = request_time + cost, request_tokens + committed
            assert time + request_time <= (1 + slack) * (tokens + request_tokens) + CREDIT + 1e-9
            assert request_time <= (1 + slack) * request_tokens + REQUEST_CREDIT + 1e-9
        time, tokens = time + request_time, tokens + request_tokens


@given(st.lists(step, max_size=60), st.lists(step, min_size=1, max_size=60))
def test_of_what_was_won_long_ago_no_more_than_the_largest_balance_is_lost(
    before: list[tuple[float, int]], after: list[tuple[float, int]]
) -> None:
    budget, lost = RegretBudget(), 0.0
    for cost, tokens in before:
        budget.charge(cost, tokens)
    for cost, tokens in after:
        if cost - 1 <= budget.overall:
            budget.charge(cost, tokens)
            lost += cost - (1 + budget.slack) * tokens
    assert lost <= MAX_BALANCE + 1e-9


def test_plain_steps_win_back_what_is_missing() -> None:
    budget = RegretBudget(slack=0.02)
    budget.charge(7.0, 1.0)
    missing = 0.5 - budget.remaining
    count = budget.steps_until(0.5, 1000)
    assert count == pytest.approx(missing / 0.02, abs=1)
    for _ in range(count):
        budget.charge(1.0, 1.0)
    assert budget.remaining >= 0.5
    assert budget.steps_until(9.0, 32) == 32
    assert RegretBudget(slack=0.0).steps_until(99.0, 16) == 16
    budget, tokens = RegretBudget(), 0
    while budget.remaining < 19.0:
        budget.charge(1.0, 1.0)
        tokens += 1
    assert tokens == pytest.approx((19 - CREDIT) / budget.slack, abs=1), "only a long request can pay for an expensive step"


class Adversary:
    """Plain steps take a second. A random rule, which may change at any time, says what drafts take and commit.

    time: charged, of all steps and replays. overrun: the largest one. forgiven_steps: number of steps that were charged less
    than they took and less than REQUEST_CREDIT beyond their expected time.
    """

    def __init__(self, seed: int, expensive: float) -> None:
        self.dice, self.expensive = random.Random(seed), expensive
        self.policy = Policy(
            LearnedCosts(
                MeanTime(1.0, 3),
                drafting={"chain": LineTime(0.1, 0.3), "expensive": LineTime(0.1, self.dice.choice([0.3, expensive]))},
                schedules={"whole": MeanTime(2.0)},
                replays={"chain": MeanTime(0.1), "expensive": MeanTime(1.0)},
            ),
            {name: DrafterState() for name in ("chain", "expensive", "whole", RECYCLE)},
        )
        self.time, self.tokens, self.request_time, self.request_tokens = 0.0, 0.0, 0.0, 0.0
        self.forgiven_steps, self.overrun, self.requests, self.in_a_row = 0, 0.0, 1, 9
        self.rule = (1.0, 0.5)

    def turn(self) -> None:
        """One decision, and what becomes of it."""
        policy, dice = self.policy, self.dice
        if dice.random() < 0.02:
            self.rule = dice.choice([1.0, 1.0, 3.0, self.expensive]), dice.random()
        if dice.random() < 0.004:
            policy.begin_request()
            self.request_time = self.request_tokens = 0.0
            self.requests += 1
        if (name := policy.next_replay({})) is not None:
            seconds, before = dice.uniform(0.05, 0.2) * self.rule[0], policy.budget.remaining
            policy.observe_replay(name, [0.9] * 32, [dice.random() < self.rule[1] for _ in range(32)], seconds)
            self.add(seconds, 0.0, before, 0.2)
        matches = [dice.choice([0, 0, 0, 1, 3, 9])]
        decision, before = policy.decide(matches), policy.budget.remaining
        request = policy.budget.request
        results = [self.result(decision) for _ in range(decision.steps)]
        costs, is_plain = policy.costs.of(decision.kind), decision.kind in (PLAIN, PROBE)
        seconds, tokens = sum(one.seconds for one in results), sum(one.tokens for one in results)
        expected = seconds if is_plain else sum(costs.step(one.passes, one.drafts + 1) for one in results)
        policy.observe(decision, [together(results)] if is_plain else results)
        charged = request + (1 + policy.budget.slack) * tokens - policy.budget.request
        self.forgiven_steps += charged < min(seconds, expected + REQUEST_CREDIT) - 1e-9
        allowed = COLD_STEPS * COLD_LOSS if decision.kind in (PLAIN, PROBE) else decision.steps * decision.stake
        self.add(charged, tokens, before, allowed + tokens)

    def add(self, charged: float, tokens: float, before: float, expected: float) -> None:
        """Hold what is charged against the bound. expected: the time for which the budget had room."""
        self.time, self.tokens = self.time + charged, self.tokens + tokens
        self.request_time, self.request_tokens = self.request_time + charged, self.request_tokens + tokens
        self.overrun = max(self.overrun, charged - tokens - max(expected - tokens, 0.0), 0.0)
        slack, most = self.policy.budget.slack, self.overrun + COLD_STEPS * COLD_LOSS + 1e-6
        assert self.time <= (1 + slack) * self.tokens + CREDIT + most
        assert self.request_time <= (1 + slack) * self.request_tokens + REQUEST_CREDIT + most

    def result(self, decision: Decision) -> StepResult:
        dice, (factor, chance) = self.dice, self.rule
        if decision.kind in (PLAIN, PROBE):
            self.in_a_row += 1
            warm = self.in_a_row > COLD_STEPS
            return StepResult(1.0, 1.0 if warm else 1.2, warm_steps=int(warm), warm_seconds=1.0 * warm)
        self.in_a_row = 0
        if decision.kind in (LOOKUP, RECYCLE):
            drafts, drafting = (sum(decision.drafts), 0.0) if decision.drafts else (len(decision.tree.ranks), 0.0)  # type: ignore[union-attr]
        else:
            drafts = dice.randint(1, max(len(decision.thresholds), 1))
            drafting = 0.3 * drafts * factor
        accepted = 0
        while accepted < drafts and dice.random() < chance:
            accepted += 1
        scoring = (1 + 0.03 * drafts) * (factor if dice.random() < 0.5 else 1.0)
        judged = [(0.9, place < accepted) for place in range(min(accepted + 1, drafts))]
        return StepResult(
            accepted + 1, drafting + scoring, 1, drafts, drafts if drafting else 0, drafting, scoring, 0.0, judged
        )


@settings(deadline=None, max_examples=12)
@given(st.integers(0, 10_000), st.sampled_from([2.0, 5.0, 20.0]))
def test_no_drafter_of_the_policy_can_lose_more_than_the_budget_allows(seed: int, expensive: float) -> None:
    """Charged time stays within the bound at every step, over all requests and over each. Not charged in full are one stall in
    HALF_LIFE tokens, the first step of each request, and the time beyond the expected time and REQUEST_CREDIT."""
    world = Adversary(seed, expensive)
    for _ in range(400):
        world.turn()
    assert world.forgiven_steps <= world.requests + 1 + world.tokens / HALF_LIFE
