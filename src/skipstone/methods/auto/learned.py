"""The state of `auto` that outlives requests: a policy for every number of rows, and when host work is done."""

import copy
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

from skipstone.decoding.drafter import Candidate
from skipstone.methods.auto.policy_log import PolicyLog
from skipstone.methods.auto.saved_profile import SavedPolicy
from skipstone.methods.recycle import AdjacencyMatrix
from skipstone.policy.choose_drafter import CHOOSE_EVERY, MAX_EXPLORATION, PLAIN_AT_ONCE, RECYCLE, WINDOW, DrafterState, Policy
from skipstone.policy.cost_model import FIRST_START, HOST, TABLE, LearnedCosts, LineTime, MeanTime
from skipstone.policy.regret_budget import CREDIT, RegretBudget
from skipstone.utils.limits import SMALL_STATE_BYTES

MIN_SAVED_STEPS = 64
"""Steps that teach something which is worth a write to the disk."""


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
    """policies: by the number of rows that decode, because step times depend on it. saved: what an earlier process has saved.
    live: the number of rows now. identities: of drafters, by name. kept: continuations for recycling. steps, kinds: number of
    steps, in all and by drafter. plain_seconds: of the latest plain steps. is_limited: the budget's credit was adapted to the
    time of a plain step. waiting: expected seconds of setting up further candidates, by what they need.
    expects_gain: one of them was faster than plain decoding in an earlier process. saved_steps: steps at the last saving."""

    policies: dict[int, Policy]
    saved: SavedPolicy | None = None
    live: int = 1
    identities: dict[str, str] = field(default_factory=dict)
    kept: AdjacencyMatrix = field(default_factory=AdjacencyMatrix)
    lookups: HostWork = field(default_factory=HostWork)
    keeping: HostWork = field(default_factory=HostWork)
    steps: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    plain_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=TABLE))
    log: PolicyLog | None = None
    is_limited: bool = False
    waiting: dict[str, float] = field(default_factory=dict)
    expects_gain: bool = False
    saved_steps: int = 0

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + (1 + len(self.policies)) * SMALL_STATE_BYTES

    @property
    def policy(self) -> Policy:
        return self.policies[self.live]

    def add_candidate(self, name: str, candidate: Candidate) -> None:
        """Let all policies know a drafter: what was saved of it, or guesses."""
        self.identities[name] = candidate.identify()
        is_saved = self.saved is not None and self.saved.identities.get(name) == self.identities[name]
        for policy in self.policies.values():
            if name not in policy.drafters:
                _add_drafter(policy, name, candidate, self.saved.policy if self.saved is not None and is_saved else None)

    def charge_setup(self, seconds: float) -> None:
        """Charge work before a step. When the time of a plain step is known, the credit becomes one in seconds."""
        budget, plain = self.policy.budget, self.policy.costs.plain.value
        if not self.is_limited:
            self.is_limited = True
            budget.set_credit(plain, expects_gain=self.expects_gain)
        budget.charge(seconds / plain, 0.0)
        self.write_state()

    @property
    def seconds_left(self) -> float:
        """The remaining budget in seconds."""
        return self.policy.budget.remaining * self.policy.costs.plain.value

    def affordable_setup(self) -> str | None:
        """What the budget covers to set up further candidates; None for nothing. A drafter that pays keeps a part of it."""
        if not self.policy.is_timed:
            return None
        kept = 0.0 if self.policy.current is None else CREDIT * self.policy.costs.plain.value
        return next((name for name, seconds in self.waiting.items() if seconds <= self.seconds_left - kept), None)

    @property
    def is_worth_saving(self) -> bool:
        """Whether enough was learnt since the last saving."""
        return self.steps - self.saved_steps >= MIN_SAVED_STEPS and self.policies[1].is_timed

    def merged_with(self, saved: SavedPolicy) -> SavedPolicy:
        """What is saved now: the policy of one row, with the drafters of the saved one that were not set up here."""
        policy = copy.deepcopy(self.policies[1])
        policy.drafters = saved.policy.drafters | policy.drafters
        for times in ("drafting", "schedules", "replays", "scoring"):
            setattr(policy.costs, times, getattr(saved.policy.costs, times) | getattr(policy.costs, times))
        return replace(saved, policy=policy, identities=saved.identities | self.identities)

    def write_state(self) -> None:
        """Log all policies."""
        for live, policy in self.policies.items():
            if self.log is not None:
                self.log.write("state", live, policy)

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


def first_policy(slack: float, recycles: bool, saved: SavedPolicy | None) -> Policy:
    """A policy without drafting models: what was saved, or guesses. Steps, and what is lost by them, count from now on."""
    policy, costs = Policy(LearnedCosts(MeanTime(0.0)), {}), LearnedCosts(MeanTime(0.0))
    if saved is not None:
        policy, known = saved.policy, saved.policy.costs
        costs = LearnedCosts(MeanTime(0.0), known.fixed, scoring={HOST: known.scoring[HOST]})
    drafters = {RECYCLE: policy.drafters.get(RECYCLE) or DrafterState()} if recycles else {}
    changes = {"costs": costs, "drafters": drafters, "budget": RegretBudget(slack), "exploration": MAX_EXPLORATION}
    return policy.renewed(**changes, current=None, starts_request=True)


def _add_drafter(policy: Policy, name: str, candidate: Candidate, saved: Policy | None) -> None:
    """saved: a policy that knows the drafter; None for guesses."""
    guesses = {
        "drafting": None if candidate.draft_step is None else LineTime(FIRST_START, candidate.draft_step),
        "schedules": MeanTime(2.0) if candidate.draft_step is None else None,
        "replays": None if candidate.replay is None else MeanTime(2 * candidate.replay),
    }
    known = saved.costs if saved is not None else LearnedCosts(MeanTime(0.0))
    for times, guess in guesses.items():
        if guess is not None:
            getattr(policy.costs, times)[name] = copy.deepcopy(getattr(known, times).get(name, guess))
    if name in known.scoring:
        policy.costs.scoring[name] = copy.deepcopy(known.scoring[name])
    state = DrafterState() if saved is None else copy.deepcopy(saved.drafters[name])
    policy.drafters[name] = replace(state, searches=candidate.searches)
