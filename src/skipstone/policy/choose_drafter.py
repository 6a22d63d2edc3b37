"""Which drafter drafts next, how far, or none; and what is measured next.

Each drafter has a rate: tokens a plain step, over its own steps and over replays of committed text. The best one drafts
(`Policy.decide`). An exploration account, a small share of the time, pays for measurements that may change the choice: replays,
trials of other drafters, and probes of plain steps. The regret budget must cover every step.

Times are in plain steps unless a name says seconds. Positions count the committed tokens, of a batch the mean of its rows.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from skipstone.policy.acceptance_estimates import ConfidenceAcceptance, MatchAcceptance, RankAcceptance
from skipstone.policy.cost_model import HOST, WELL_KNOWN, LearnedCosts, StepCosts, expected_tokens
from skipstone.policy.draft_length import LOOKAHEAD, MAX_DRAFTS, RankTree, best_drafts, stop_thresholds
from skipstone.policy.regret_budget import REQUEST_CREDIT, RegretBudget

PLAIN, PROBE, LOOKUP, RECYCLE = "plain", "probe", "lookup", "recycle"  # kinds of steps without a drafting model
REPLAY, TRIAL = "replay", "trial"  # kinds of measurements, next to PROBE
HALF_LIFE = 300.0  # tokens after which a step counts half in a drafter's rate: a passage of text
PRIOR_TIME = 8.0  # plain steps at rate 1 that a rate begins with: fewer let one lucky replay choose a drafter
MARGIN = 0.02  # share by which another drafter's rate must be larger: noise of a rate over 300 tokens
CHOOSE_EVERY = 16  # tokens between two choices of a drafter; with 24, chains lose up to 5 % on text that changes (simulated)
WINDOW = 32  # tokens of a replay: one pass over them takes hardly longer than one over eight
COPIED = 8  # tokens that a lookup commits in a copied passage, which says nothing of other drafters
EXPLORATION_SHARE = 0.008  # of the time that exploration may lose: with .004 wrong costs are unlearnt too slowly (simulated)
MAX_EXPLORATION = 4.0  # plain steps on the exploration account at first, and at most: a trial that fails costs up to three
SPREAD = 1.5  # relative standard deviation of the tokens of one step, for the upper confidence bound of a rate
REMEASURE_AFTER = 1000  # tokens after which a drafter is replayed, and timed, again
STEADY = 1.05  # factor between the times of plain steps that are equally fast, but for noise
TRIAL_STEPS = 3  # steps of a trial; only the last is timed, because the caches are cold before
TRIAL_THRESHOLDS = (0.0, 0.0, *(0.5,) * (LOOKAHEAD - 2))  # of a trial: two drafts, and more while the drafter is sure
COST_DOUBT = 4.0  # factor by which costs that were never measured here may be too high; its root for old measurements
CHANGED = 1.25  # factor between the times of two steps and their expected times that causes a probe; its root: of a plain step
COLD_STEPS, COLD_LOSS = 2, 0.5  # plain steps after a draft that find cold caches, and the time that each loses at most
PROBE_STEPS = COLD_STEPS + 2  # the last two are measured
STEPS_AT_ONCE = 6  # steps of a well-known drafter per decision: deciding takes about 2 % of the shortest steps (1.6 ms)
PLAIN_AT_ONCE = 128  # most plain steps per decision; tokens between two probes


class Decision(NamedTuple):
    """What the next steps do, and why.

    kind: PLAIN, PROBE, LOOKUP, RECYCLE, or a drafter's name. price: tokens that a plain step is worth. current: the best
    drafter. thresholds: survivals that a chain needs to go on; shared: the same for one of several rows, which share the draft
    step. drafts: of a lookup, by row. explores: whether the exploration account pays. steps: that the decision stands for, if
    no lookup is worth more. stake: plain steps that one of them loses if no draft is accepted.
    """

    kind: str
    price: float = 1.0
    current: str | None = None
    reason: str = ""
    thresholds: tuple[float, ...] = ()
    shared: tuple[float, ...] = ()
    drafts: tuple[int, ...] = ()
    tree: RankTree | None = None
    explores: bool = False
    steps: int = 1
    stake: float = 0.0

    @property
    def num_drafts(self) -> float:
        """Drafts of a row at most, of lookups the mean of the rows."""
        if self.tree is not None:
            return len(self.tree.ranks)
        return sum(self.drafts) / len(self.drafts) if self.drafts else len(self.thresholds)


@dataclass(slots=True)
class StepResult:
    """The outcome of a step, or of several plain ones. All counts are means over the rows of a batch.

    tokens: committed. drafts: scored. passes: draft steps. drafting, scoring, fixed: seconds of these and of the policy, parts
    of `seconds`, 0 if unknown. confidences: (confidence, accepted) of judged drafts. matches: (length, right tokens of the
    continuation, compared tokens). ranks: of one row's tokens among the kept ones. warm_steps, warm_seconds: plain steps after
    others, and the time of one. preparing: the engine compiled something.
    """

    tokens: float
    seconds: float
    steps: int = 1
    drafts: float = 0.0
    passes: int = 0
    drafting: float = 0.0
    scoring: float = 0.0
    fixed: float = 0.0
    confidences: Sequence[tuple[float, bool]] = ()
    matches: Sequence[tuple[int, int, int]] = ()
    ranks: Sequence[int] = ()
    warm_steps: int = 0
    warm_seconds: float = 0.0
    preparing: bool = False


@dataclass(slots=True)
class Rate:
    """Tokens, time and number of the latest steps of a drafter. Older ones count less."""

    tokens: float = 0.0
    time: float = 0.0
    steps: float = 0.0
    position: int = 0

    def add(self, position: int, tokens: float, time: float, steps: int = 1) -> None:
        self.fade(position)
        self.tokens, self.time, self.steps = self.tokens + tokens, self.time + time, self.steps + steps

    def fade(self, position: int, half_lives: int = 0) -> None:
        keep = 0.5 ** ((position - self.position) / HALF_LIFE + half_lives)
        self.tokens, self.time, self.steps, self.position = self.tokens * keep, self.time * keep, self.steps * keep, position

    @property
    def value(self) -> float:
        """Tokens a plain step."""
        return (self.tokens + PRIOR_TIME) / (self.time + PRIOR_TIME)

    @property
    def upper_bound(self) -> float:
        return self.value * (1 + SPREAD / math.sqrt(self.steps + 1))


@dataclass(slots=True)
class DrafterState:
    """What is known of a drafter. seen_at: position of its latest step or replay. thresholds, shared: at price 1, set at
    `priced_at`. searches: its replays evaluate candidates of a search, which are worth any cost below the budget."""

    rate: Rate = field(default_factory=Rate)
    acceptance: ConfidenceAcceptance = field(default_factory=ConfidenceAcceptance)
    seen_at: int = -REMEASURE_AFTER
    thresholds: tuple[float, ...] = ()
    shared: tuple[float, ...] = ()
    priced_at: int = 0
    searches: bool = False

    @property
    def is_hopeless(self) -> bool:
        """Whether not even its first draft is worth its time."""
        return bool(self.thresholds) and self.thresholds[0] > 1

    def thresholds_at(self, price: float) -> tuple[float, ...]:
        """The first one is compared with a plain step, so it keeps price 1."""
        return (*self.thresholds[:1], *[one * price for one in self.thresholds[1:]])


@dataclass(slots=True)
class Policy:
    """The state that decisions depend on. `decide`, `stands` and `next_replay` only read it. `begin_request`, `observe` and
    `observe_replay` change it. So a list of events makes every decision again.

    drafters: with RECYCLE if tokens are recycled. lookups: their rate. rows: that decode. current: the best drafter, None for
    plain decoding. trial: (drafter, steps left). surprises: number of steps in a row that took longer than expected (negative:
    less long); surprised: their drafter. starts_request: no step of the request was taken yet.
    """

    costs: LearnedCosts
    drafters: dict[str, DrafterState]
    budget: RegretBudget = field(default_factory=RegretBudget)
    recycled: RankAcceptance = field(default_factory=RankAcceptance)
    matches: MatchAcceptance = field(default_factory=MatchAcceptance)
    lookups: Rate = field(default_factory=Rate)
    rows: int = 1
    current: str | None = None
    position: int = 0
    chosen_at: int | None = None
    probed_at: int = 0
    stalled_at: int = -REMEASURE_AFTER
    exploration: float = MAX_EXPLORATION
    trial: tuple[str, int] | None = None
    surprises: int = 0
    surprised: str = HOST
    starts_request: bool = True

    def decide(self, matches: Sequence[int] = (), can_replay: bool = True) -> Decision:
        """What the next steps do. matches: by row, length of the longest match of its end; empty if none is looked up.
        can_replay: whether `next_replay` is called as well, so that drafters are tried only if that is worth more."""
        current = self._choose()
        plain = Decision(PLAIN, self._price_of(current), current)
        if abs(self.surprises) > 1 and self.position - self.probed_at > WINDOW:
            return self._probe(plain, "steps took longer, or less long, than expected: a plain step is measured")
        if self.budget.remaining <= 0:
            return self._wait(plain, 0.0)
        explored = self._continue_trial(plain) or self._explore(plain, matches, can_replay)
        return explored or self._look_up(plain, matches) or self._draft(plain)

    def stands(self, decision: Decision, matches: Sequence[int]) -> bool:
        """Whether a decision for several steps still holds with the current matches."""
        return self._look_up(decision, matches) is None

    def next_replay(self, lag: Mapping[str, int]) -> str | None:
        """The drafter to replay now; None for none. lag: drafter -> tokens that it would have to read."""
        if self.budget.remaining <= 0 or self._continue_trial(Decision(PLAIN)) is not None:
            return None
        kind, name = self._best_exploration(self._choose(), lag)
        return name if kind == REPLAY else None

    @property
    def is_timed(self) -> bool:
        """Whether the time of plain decoding is known. Only then may `decide` and `next_replay` be called."""
        return self.costs.plain.measurements >= TRIAL_STEPS

    @property
    def _may_choose(self) -> bool:
        """Whether drafters are compared with each other before the next step."""
        return self.chosen_at is None or self.position - self.chosen_at >= CHOOSE_EVERY

    def _choose(self) -> str | None:
        """The best drafter, None for plain decoding."""
        if not self._may_choose and (self.current != RECYCLE or self.recycled.tree is not None):
            return self.current
        rates = self.rates()
        rate, best = rates.get(self.current or "", 1.0), max(rates, key=rates.__getitem__, default=None)
        if best is not None and rates[best] > max(rate, 1.0) * (1 + MARGIN):
            return best
        return self.current if self.current in rates and rate > 1 - MARGIN else None

    def rates(self) -> dict[str, float]:
        """Of all drafters that could draft now."""
        return {name: one.rate.value for name, one in self.drafters.items() if name != RECYCLE or self.recycled.tree}

    def _price_of(self, current: str | None) -> float:
        """Tokens that a plain step is worth."""
        return 1.0 if current is None or (own := self.drafters[current]).is_hopeless else max(1.0, own.rate.value)

    def _probe(self, plain: Decision, reason: str) -> Decision:
        return plain._replace(kind=PROBE, reason=reason, steps=PROBE_STEPS, explores=True)

    def _wait(self, plain: Decision, amount: float) -> Decision:
        """At least CHOOSE_EVERY plain steps, until the budget covers an amount. After fewer steps the next decision would cost
        more than they have added to the budget."""
        steps = self.budget.steps_until(amount, PLAIN_AT_ONCE if plain.current is None else WINDOW)
        reason = "the regret budget is spent: plain until it recovers"
        return plain._replace(reason=reason, steps=max(steps, CHOOSE_EVERY))

    def _draft(self, plain: Decision) -> Decision:
        name, price = plain.current, plain.price
        if name is None:
            return plain._replace(reason="nothing is faster than plain decoding", steps=WINDOW)
        own, reason = self.drafters[name], f"{name}: {price:.2f} x plain decoding"
        if own.is_hopeless:
            return plain._replace(reason=f"{name} is right too seldom to be worth a draft", steps=PROBE_STEPS)
        thresholds, shared = own.thresholds_at(price), tuple([one * price for one in own.shared])
        tree = self.recycled.tree if name == RECYCLE else None
        steps = STEPS_AT_ONCE if self.costs.measurements(name) >= WELL_KNOWN else 1
        decision = Decision(name, price, name, reason, thresholds, shared, tree=tree, steps=steps)
        return self._affordable(decision) or self._wait(plain, self._stake(name, 1))

    @property
    def awaited(self) -> float:
        """Plain steps of the regret budget that the current drafter needs for a draft."""
        name = self.current
        return 0.0 if name is None or name == RECYCLE or self.drafters[name].is_hopeless else self._stake(name, 1)

    def _stake(self, kind: str, drafts: float) -> float:
        """Plain steps that a step loses if none of so many drafts is accepted."""
        return self.costs.of(kind).step(drafts) - 1

    def _affordable(self, decision: Decision) -> Decision | None:
        """The decision with as many drafts and steps as the budget covers; None for none."""
        remaining = self.budget.remaining
        while (stake := self._stake(decision.kind, decision.num_drafts)) > remaining:
            drafts, thresholds = list(decision.drafts), decision.thresholds[:-1]
            if max(drafts, default=0) > 1:
                drafts[drafts.index(max(drafts))] -= 1
            elif not thresholds:
                return None
            decision = decision._replace(drafts=tuple(drafts), thresholds=thresholds, shared=decision.shared[: len(thresholds)])
        steps = decision.steps if stake * decision.steps <= remaining else int(remaining / stake)
        return decision._replace(steps=steps, stake=stake)

    def _look_up(self, plain: Decision, matches: Sequence[int]) -> Decision | None:
        """A lookup, if it gains more than the current drafter in the same time."""
        if not any(matches):
            return None
        rows, scoring, price = len(matches), self.costs.scoring[HOST], plain.price
        survivals = [self.matches.predict(match, scoring.max_drafts) if match else [] for match in matches]
        drafts = best_drafts(survivals, price, scoring if rows == 1 else lambda n: rows * scoring(n / rows))
        tokens = 1 + sum([sum(chain[:n]) for chain, n in zip(survivals, drafts, strict=True)]) / rows
        if tokens <= price * self.costs.of(LOOKUP).step(sum(drafts) / rows):
            return None
        reason = f"a match of {max(matches)}: {tokens:.1f} tokens expected"
        return self._affordable(Decision(LOOKUP, price, plain.current, reason, drafts=tuple(drafts)))

    def _explore(self, plain: Decision, matches: Sequence[int], can_replay: bool) -> Decision | None:
        """A step that measures something; None if nothing is due or affordable."""
        if self._may_choose and self.exploration >= COLD_LOSS and self._is_old(HOST):
            decision = plain._replace(reason="the scoring of lookups and recycled tokens is timed", explores=True)
            if any(matches):
                return self._affordable(decision._replace(kind=LOOKUP, drafts=tuple([2 * min(match, 1) for match in matches])))
            if RECYCLE in self.drafters and not matches and self.position >= CHOOSE_EVERY:
                return self._affordable(decision._replace(kind=RECYCLE, tree=RankTree((-1, 0), (0, 0))))
        kind, name = self._best_exploration(plain.current, {}, can_replay)
        if kind == PROBE:
            return self._probe(plain, "a plain step is measured")
        return self._try(plain, name) if kind == TRIAL else None

    def _try(self, plain: Decision, name: str) -> Decision | None:
        thresholds = () if name in self.costs.schedules else TRIAL_THRESHOLDS
        return self._affordable(plain._replace(kind=name, reason=f"{name} is tried", thresholds=thresholds, explores=True))

    def _continue_trial(self, plain: Decision) -> Decision | None:
        return None if self.trial is None or self.exploration < 0 else self._try(plain, self.trial[0])

    def _is_old(self, name: str) -> bool:
        """Whether a drafter was timed long ago, or not in this process."""
        timed_at = self.costs.timed_at.get(name)
        return timed_at is None or self.position - timed_at > REMEASURE_AFTER

    def _best_exploration(self, current: str | None, lag: Mapping[str, int], can_replay: bool = True) -> tuple[str, str]:
        """Kind and drafter of the best measurement; empty if there is none, or the exploration account still saves for it."""
        explorations = self._explorations(current, lag, can_replay) if self._may_choose else ()
        _, cost, kind, name = max(explorations, default=(0.0, math.inf, "", ""))
        return (kind, name) if self.exploration >= min(cost, MAX_EXPLORATION) else ("", "")

    def _explorations(
        self, current: str | None, lag: Mapping[str, int], can_replay: bool
    ) -> Iterable[tuple[float, float, str, str]]:
        """All measurements that the regret budget covers, as (tokens since the last one per plain step of its cost, plain steps
        that it is expected to lose, PROBE or REPLAY or TRIAL, drafter)."""
        best, price, remaining = max([1.0, *self.rates().values()]), self._price_of(current), self.budget.remaining
        since_probe = self.position - self.probed_at
        if current is not None and since_probe > PLAIN_AT_ONCE and remaining > COLD_STEPS * COLD_LOSS:
            cost = PROBE_STEPS * (1 - 1 / price) + COLD_LOSS
            yield since_probe / cost, cost, PROBE, PLAIN
        for name, one in self.drafters.items():
            if name == RECYCLE or (name == current and not one.is_hopeless):
                continue
            age, timed_at = self.position - one.seen_at, self.costs.timed_at.get(name, -REMEASURE_AFTER)
            is_unknown = one.rate.steps < TRIAL_STEPS
            is_due = age > REMEASURE_AFTER or (age >= WINDOW and one.rate.upper_bound > best)
            replay = self.costs.replays[name].value if can_replay and name in self.costs.replays else math.inf
            is_replayed = replay < (math.inf if one.searches else 1.0)  # a longer replay loses more than two steps of a trial
            cost = replay * max(lag.get(name, 0) / WINDOW, 1.0)
            if is_replayed and is_due and self.position >= CHOOSE_EVERY and cost <= remaining:
                yield age * (TRIAL_STEPS if is_unknown else 1) / cost, cost, REPLAY, name
            is_tried = (is_due and not is_replayed) or (self._is_old(name) and self._potential(name) > best)
            if is_tried and self._stake(name, 2) <= remaining:
                cost = self._trial_cost(name, price)
                since = self.position - (timed_at if is_replayed else min(timed_at, one.seen_at))
                is_promising = timed_at < 0 and not is_unknown  # by replays: only its costs are unknown
                yield math.inf if is_promising else since / cost, cost, TRIAL, name

    def _trial_cost(self, name: str, price: float) -> float:
        costs, tokens = self.costs.of(name), expected_tokens(self.drafters[name].acceptance.mean, TRIAL_STEPS)
        lost = costs.step(0) - 1 if name in self.costs.schedules else TRIAL_STEPS * (costs.step(TRIAL_STEPS) - tokens / price)
        return max(lost, COLD_LOSS)

    def _potential(self, name: str) -> float:
        """The speed-up of a drafter with the best number of drafts if its costs are too high by COST_DOUBT. A pass over several
        tokens takes at least a plain step, unless drafting is believed to do a part of it."""
        if name in self.costs.schedules:
            return self.drafters[name].rate.upper_bound
        costs, acceptance = self.costs.of(name), self.drafters[name].acceptance.mean
        doubt = math.sqrt(COST_DOUBT) if name in self.costs.timed_at else COST_DOUBT
        scoring = [max(one / doubt, min(one, 1.0)) for one in self.costs.scoring_of(name).table[: LOOKAHEAD + 2]]
        doubted = StepCosts(1.0, costs.draft_step / doubt, scoring.__getitem__, costs.start / doubt, costs.fixed / doubt)
        return max([doubted.speedup(expected_tokens(acceptance, k), k) for k in range(1, LOOKAHEAD + 1)])

    def begin_request(self) -> None:
        """A request begins while no other is running: rates of earlier ones count half."""
        self.budget.begin_request()
        self.starts_request = True
        for one in self.drafters.values():
            one.rate.fade(self.position, half_lives=1)

    def resized(self, rows: int) -> "Policy":
        """The policy for another number of rows, with the same budget. If that is less than twice as many, or more than half,
        step times are about the same and one plain step is timed. Otherwise step times are guesses."""
        other = copy.deepcopy(self).renewed(budget=self.budget, rows=rows)
        is_near = max(rows, self.rows) < 2 * min(rows, self.rows)
        other.costs.plain.measurements = TRIAL_STEPS - 1 if is_near else 0
        if not is_near:
            other.costs.scoring, other.costs.timed_at = {HOST: self.costs.scoring[HOST].among(rows / self.rows)}, {}
        for one in other.drafters.values():
            one.thresholds, one.shared = (), ()
        return other

    def renewed(self, **changes: Any) -> "Policy":
        """The same state with changes, and no measurement under way."""
        return replace(self, chosen_at=None, trial=None, surprises=0, **changes)

    def observe(self, decision: Decision, results: Sequence[StepResult]) -> None:
        """Learns from the steps of a decision. Its kind is PLAIN if there was nothing to draft. Plain steps are one result."""
        kind, tokens, is_choice = decision.kind, sum([one.tokens for one in results]), self._may_choose
        if (self.current != decision.current or is_choice) and self.is_timed:
            self.chosen_at, self.current = self.position, decision.current
            for one in self.drafters.values():
                one.rate.fade(self.position)
        is_plain = kind in (PLAIN, PROBE)
        time = self._observe_plain(decision, results[0]) if is_plain else self._observe_drafting(decision, results, is_choice)
        self.budget.charge(time, tokens)
        for match in [match for one in results for match in one.matches]:
            self.matches.observe(*match)
        if RECYCLE in self.drafters and not (kind == LOOKUP and tokens >= COPIED):
            self._observe_ranks(decision, [rank for one in results for rank in one.ranks])
        lost = time - tokens / decision.price if decision.explores else 0.0
        self.exploration = min(max(self.exploration - lost, -1.0) + EXPLORATION_SHARE * time, MAX_EXPLORATION)
        self.position += round(tokens)
        self.starts_request = False
        if self.current is not None and self.current in self.costs.drafting:
            own = self.drafters[self.current]
            if not own.thresholds or self.position - own.priced_at > min(2 * WINDOW, own.rate.steps):
                self._set_thresholds(self.current)

    def _observe_plain(self, decision: Decision, result: StepResult) -> float:
        """After plain steps. Each is charged one plain step, those after a draft also their extra time. The others tell whether
        the machine or a drafter caused surprises."""
        plain, steps, warm = self.costs.plain, result.steps, result.warm_steps
        if not self.is_timed:
            self._time_plain(result.seconds / steps)
            return float(steps)
        excess = (result.seconds - warm * result.warm_seconds) / plain.value - (steps - warm)
        time = steps + min(max(excess, 0.0), COLD_LOSS * (steps - warm)) + result.fixed / plain.value
        if warm:
            if abs(self.surprises) > 1:
                if (result.warm_seconds / plain.value) ** math.copysign(2, self.surprises) > CHANGED:
                    plain.value = result.warm_seconds
                else:
                    self.costs.doubt(self.surprised)
                self.surprises = 0
            plain.observe(result.warm_seconds)
            self.probed_at = self.position
        if decision.current is not None and self.drafters[decision.current].is_hopeless:
            self.drafters[decision.current].rate.add(self.position, steps, steps, steps)
        return time

    def _time_plain(self, seconds: float) -> None:
        """The first steps of a process become faster while its code and weights come into the caches. A step that is faster
        than those before starts the timing again."""
        plain = self.costs.plain
        if seconds * STEADY < plain.value:
            plain.measurements = 0
        plain.observe(seconds)

    def _observe_drafting(self, decision: Decision, results: Sequence[StepResult], is_choice: bool) -> float:
        """After steps that drafted. Returns the charged time. is_choice: drafters were compared; only then are
        well-known costs learnt."""
        kind, tokens, preparing = decision.kind, sum([one.tokens for one in results]), any(one.preparing for one in results)
        costs, taken = self.costs.of(kind), sum([one.seconds for one in results]) / self.costs.plain.value
        expected = sum([costs.step(one.passes, one.drafts + 1) for one in results])
        time = self._charged(taken, expected, preparing)
        if not self._is_warming_up(decision, len(results), taken - expected > MAX_EXPLORATION) and not preparing:
            self._watch(kind, taken / expected)
            is_routine = self.costs.measurements(kind) >= WELL_KNOWN and not self.surprises and not is_choice
            if abs(self.surprises) < 2 and not is_routine:
                self._time(kind, results[-1])
        if kind == LOOKUP and not decision.explores:
            self.lookups.add(self.position, tokens, time)
        if kind in self.drafters and (kind != RECYCLE or not decision.explores):
            one = self.drafters[kind]
            for result in results:
                one.acceptance.observe(result.confidences)
            one.rate.add(self.position, tokens, time, len(results))
            one.seen_at = self.position + round(tokens)
        if decision.explores:
            self.chosen_at = None
        return time

    def _charged(self, time: float, expected: float, preparing: bool) -> float:
        """The charged time of steps. Compiling is not charged, nor is the first step of a request, which finds caches that the
        prompt has filled. A rare stall is charged as twice the expected time, others as REQUEST_CREDIT more at most."""
        if preparing or self.starts_request:
            return min(time, max(expected, 1.0))
        if time > 2 * expected and self.position - self.stalled_at > HALF_LIFE:
            self.stalled_at = self.position
            return 2 * expected
        return min(time, expected + REQUEST_CREDIT)

    def _is_warming_up(self, decision: Decision, steps: int, is_slow: bool) -> bool:
        """Whether these are untimed steps of a trial, which a drafter's first steps in a process are, too. One with its own
        schedule has none. A slow step ends the trial."""
        kind, has_schedule = decision.kind, decision.kind in self.costs.schedules
        is_trial = decision.explores or kind not in self.costs.timed_at
        if not is_trial or not (has_schedule or kind in self.costs.drafting):
            return False
        name, left = self.trial or ("", 0)
        left = (left if name == kind else TRIAL_STEPS) - steps
        self.trial = (kind, left) if left > 0 and not is_slow else None
        return self.trial is not None and not has_schedule

    def _watch(self, kind: str, factor: float) -> None:
        """Counts surprises; two in a row cause a probe. factor: time over expected time."""
        sign = 0 if self.starts_request or 1 / CHANGED < factor < CHANGED else 1 if factor > 1 else -1
        self.surprises, self.surprised = (self.surprises if self.surprises * sign > 0 else 0) + sign, kind

    def _time(self, kind: str, result: StepResult) -> None:
        costs, plain = self.costs, self.costs.plain.value
        name = kind if kind in costs.drafting or kind in costs.schedules else HOST
        if name not in costs.timed_at:
            costs.doubt(name)
        if name in costs.schedules:
            costs.schedules[name].observe(result.seconds / plain)
        else:
            costs.fixed += (result.fixed / plain - costs.fixed) / CHOOSE_EVERY
            if result.scoring and result.drafts:
                costs.observe_scoring(name, result.drafts + 1, result.scoring / plain)
            if result.drafting and result.passes:
                costs.drafting[name].observe(result.passes, result.drafting / plain)
        costs.timed_at[name] = self.position

    def _observe_ranks(self, decision: Decision, ranks: Sequence[int]) -> None:
        tree, rate, scoring = self.recycled.tree, self.drafters[RECYCLE].rate, self.costs.scoring[HOST]
        self.recycled.observe(ranks)
        if decision.kind == RECYCLE:
            self.recycled.pending.clear()
        elif tree is not None:
            for tokens in self.recycled.decode_virtually():
                rate.add(self.position, tokens, self.costs.of(RECYCLE).step(len(tree.ranks)))
        if self.position >= CHOOSE_EVERY:
            self.recycled.build(self.position, max(1.0, rate.value), scoring.table[: scoring.max_drafts + 2])

    def _set_thresholds(self, name: str) -> None:
        own, costs, scoring = self.drafters[name], self.costs.of(name), self.costs.scoring_of(name)
        mean, most = own.acceptance.mean, min(MAX_DRAFTS, scoring.max_drafts)
        own.thresholds = tuple(stop_thresholds(costs.draft_step, costs.fixed + costs.start, scoring, mean, 1.0, most))
        own.shared = tuple(stop_thresholds(0.0, 0.0, scoring, mean, 1.0, most)) if self.rows > 1 else ()
        own.priced_at = self.position

    def observe_replay(
        self, name: str, confidences: Sequence[float], right: Sequence[bool], seconds: float = 0.0, read: int = 0
    ) -> None:
        """Learns from a replay of a drafter on the latest committed tokens: it decodes them virtually with its thresholds.

        confidences, right: by token; empty if they do not describe its current drafts. seconds: of the replay, 0 if unknown.
        read: tokens that it had to read.
        """
        one = self.drafters[name]
        if seconds:
            time = seconds / self.costs.plain.value
            self.costs.replays[name].observe(time / max(read / WINDOW, 1.0))
            self.exploration = max(self.exploration - time, -1.0)
            self.budget.charge(time, 0.0)
        one.seen_at, self.chosen_at = self.position, None
        if not right:
            return
        one.acceptance.observe(zip(confidences, right, strict=True))
        self._set_thresholds(name)
        thresholds, costs, place = one.thresholds_at(max(1.0, one.rate.value)), self.costs.of(name), 0
        while place < len(right):
            survival, drafts, accepted, good = 1.0, 0, 0, True
            while place + drafts < len(right) and drafts < len(thresholds) and survival >= thresholds[drafts]:
                survival *= one.acceptance.predict(confidences[place + drafts])
                good = good and right[place + drafts]
                accepted, drafts = accepted + good, drafts + 1
            one.rate.add(self.position, accepted + 1, costs.step(drafts) if drafts else 1.0)
            place += accepted + 1
