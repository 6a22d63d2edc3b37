"""The state of `auto` that outlives requests: a policy for every number of rows, and when host work is done."""

import copy
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skipstone.decoding.drafter import Candidate
from skipstone.methods.auto.policy_log import PolicyLog
from skipstone.methods.recycle import AdjacencyMatrix
from skipstone.policy.choose_drafter import CHOOSE_EVERY, PLAIN_AT_ONCE, RECYCLE, WINDOW, DrafterState, Policy
from skipstone.policy.cost_model import FIRST_START, TABLE, LearnedCosts, LineTime, MeanTime
from skipstone.policy.regret_budget import RegretBudget
from skipstone.utils.limits import SMALL_STATE_BYTES


@dataclass
class HostWork:
    """When work that takes host time in every step is done: looking texts up, or keeping continuations for recycling.

    It is done while it pays, for the first WINDOW steps of a text, and for PLAIN_AT_ONCE steps after ever longer rests. until:
    step at which it rests, for `rest` steps. gain, spent: plain steps that a step of it gains and takes.
    """

    until: int = PLAIN_AT_ONCE
    rest: int = 2 * PLAIN_AT_ONCE
    text_until: int = 0
    gain: float = 0.5
    spent: float = 0.0

    def begin_text(self, step: int) -> None:
        self.text_until = step + WINDOW

    def observe(self, gain: float, spent: float) -> None:
        """After a step in which it was done."""
        self.gain += (gain - self.gain) / WINDOW
        self.spent += (spent - self.spent) / WINDOW

    def is_wanted(self, step: int, pays: bool) -> bool:
        """Whether to do it in this step. Called once a step."""
        if pays:
            self.until, self.rest = step + PLAIN_AT_ONCE, 2 * PLAIN_AT_ONCE
        elif step >= self.until + self.rest:
            self.until, self.rest = step + PLAIN_AT_ONCE, min(2 * self.rest, CHOOSE_EVERY * PLAIN_AT_ONCE)
        return step < max(self.until, self.text_until)


@dataclass
class Learned:
    """policies: by the number of rows that decode, because step times depend on it. live: that number now. kept: continuations
    for recycling. steps, kinds: number of steps, in all and by drafter. plain_seconds: of the latest plain steps. has_credit:
    the budget's credit is right for the time of a plain step; a saved profile has its credit because it knows what pays."""

    policies: dict[int, Policy]
    live: int = 1
    kept: AdjacencyMatrix = field(default_factory=AdjacencyMatrix)
    lookups: HostWork = field(default_factory=HostWork)
    keeping: HostWork = field(default_factory=HostWork)
    steps: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    plain_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=TABLE))
    log: PolicyLog | None = None
    has_credit: bool = False

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + (1 + len(self.policies)) * SMALL_STATE_BYTES

    @property
    def policy(self) -> Policy:
        return self.policies[self.live]

    def add_drafters(self, first: Policy) -> None:
        """Let all policies know the drafters of a first policy that they do not know yet."""
        for policy in self.policies.values():
            for name in first.drafters.keys() - policy.drafters.keys():
                policy.drafters[name] = copy.deepcopy(first.drafters[name])
                for times in ("drafting", "schedules", "replays"):
                    if name in (new := getattr(first.costs, times)):
                        getattr(policy.costs, times)[name] = copy.deepcopy(new[name])

    def limit_credit(self) -> None:
        """Once, when the time of a plain step is known: a short answer may not lose more than CREDIT_SECONDS."""
        if not self.has_credit:
            self.has_credit = True
            self.policy.budget.limit_credit(self.policy.costs.plain.value)

    def begin_request(self) -> None:
        """A request begins while no other is running."""
        for policy in self.policies.values():
            policy.begin_request()
        if self.log is not None:
            self.log.write("request", 0)

    def resize(self, live: int) -> None:
        """The number of rows that decode has changed."""
        if live == self.live or not live:
            return
        before, self.live = self.policy, live
        if live not in self.policies:
            nearest = min(self.policies, key=lambda rows: max(rows, live) / min(rows, live))
            self.policies[live] = self.policies[nearest].resized(live)
        self.policy.budget = before.budget  # all numbers of rows share one budget
        if self.log is not None:
            self.log.write("state", live, self.policy)

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        policy, costs = self.policy, self.policy.costs
        plain = costs.plain.value
        if not costs.plain.measurements:
            return {}
        ordered = sorted(self.plain_seconds) or [plain]
        far = max(int(len(ordered) / 2 - len(ordered) ** 0.5), 0)  # half the root is a standard deviation of the median's place
        return {
            "steps": self.steps,
            "kinds": self.kinds,
            "current": policy.current,
            "plain_seconds": plain,
            "plain_interval": (min(ordered[far], plain), max(ordered[-1 - far], plain)),  # 95 %
            "draft_steps": {name: line.step for name, line in costs.drafting.items()},
            "draft_setups": {name: line.start for name, line in costs.drafting.items()},
        }


def first_policy(candidates: Mapping[str, Candidate], slack: float, recycles: bool) -> Policy:
    """A policy whose costs are guesses."""
    policy = Policy(LearnedCosts(MeanTime(0.0)), {}, RegretBudget(slack))
    for name, one in candidates.items():
        policy.drafters[name] = DrafterState(searches=one.searches)
        if one.draft_step is None:
            policy.costs.schedules[name] = MeanTime(2.0)
        else:
            policy.costs.drafting[name] = LineTime(FIRST_START, one.draft_step)
        if one.replay is not None:
            policy.costs.replays[name] = MeanTime(2 * one.replay)
    if recycles:
        policy.drafters[RECYCLE] = DrafterState()
    return policy
