"""Which drafter drafts next, how far, or none; and what is measured next.

Each drafter has a rate: tokens a plain step, over its own steps and over replays of committed text. The best one drafts
(`Policy.decide`). An exploration account, a small share of the time, pays for what may change that: replays, exploration steps
of other drafters, and measurements of a plain step. The regret budget must cover every step.

Times are in plain steps unless a name says seconds. Positions count the committed tokens, of a batch the mean of its rows.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from skipstone.policy.acceptance import ConfidenceAcceptance, MatchAcceptance, RankAcceptance
from skipstone.policy.cost_model import HOST, WELL_KNOWN, LearnedCosts, expected_tokens
from skipstone.policy.draft_length import LOOKAHEAD, MAX_DRAFTS, RankTree, best_drafts, stop_thresholds
from skipstone.policy.regret_budget import RegretBudget

PLAIN, PROBE, LOOKUP, RECYCLE = "plain", "probe", "lookup", "recycle"
"""Steps that no model drafts for. A probe is a plain step that is taken to measure one."""

HALF_LIFE, USUAL_HALF_LIFE = 300.0, 4000.0
"""Tokens after which a step counts half in a drafter's rate, and in its usual rate: a passage, and a dozen requests."""
PRIOR_TIME = 8.0
"""Plain steps at the usual rate that a rate begins with, and at rate 1 that a usual rate begins with."""
MARGIN = 0.02
"""Share by which another drafter's rate must be larger: noise of a rate over 300 tokens."""
CHOOSE_EVERY = 16
"""Tokens between two choices of a drafter."""
WINDOW = 32
"""Tokens of a replay. One pass over them takes hardly longer than one over eight."""
COPIED = 8
"""Tokens that a lookup commits in a copied passage, which says nothing of other drafters."""
EXPLORATION_SHARE = 0.005
"""Share of the time that exploration may lose; at first three times as much, and less with every HALF_LIFE tokens."""
MAX_EXPLORATION = 4.0
"""Plain steps on the exploration account at first, and at most: an exploration of a drafter that fails costs up to three."""
SPREAD = 1.5
"""Relative standard deviation of the tokens of one step, for the upper confidence bound of a rate."""
TRIAL_STEPS = 3
"""Steps of an exploration by drafting, and steps up to which next to nothing is known of a drafter. Only the last step is
timed: the first ones find other weights in the caches."""
TRIAL_THRESHOLDS = (0.0, 0.0, *(0.5,) * (LOOKAHEAD - 2))
"""Of such a step: two drafts, and more while the drafter is sure."""
AGAIN = 1000
"""Tokens after which a drafter is replayed, and timed, again."""
COST_DOUBT = 4.0
"""Factor by which costs may be too high that this process has not measured: a saved profile may be wrong by 3. Those that were
measured long ago may be by its root. A drafter that is worth drafting if they are is timed. One that is believed to be slow
would otherwise never be tried again."""
CHANGED = 1.25
"""Factor by which two steps in a row must differ from what was expected before a plain step is measured. The plain step must
differ by its root for the whole machine to be slower or faster."""
COLD_STEPS, COLD_LOSS = 2, 0.5
"""Plain steps behind a draft that are slow because it filled the caches, and what each counts as lost at most."""
PROBE_STEPS = COLD_STEPS + 2
"""Plain steps of a probe, of which the last two are measured."""
STEPS_AT_ONCE, PLAIN_AT_ONCE = 6, 128
"""Steps of a well-known drafter, and plain ones where nothing pays, that one decision stands for: deciding takes about 2 % of
the shortest steps there are (1.6 ms). Also the tokens between two probes."""


class Decision(NamedTuple):
    """What the next steps do, and why. kind: PLAIN, PROBE, LOOKUP, RECYCLE, or a drafter's name. price: tokens that a plain
    step is worth. current: the best drafter now. thresholds: survivals that a chain needs to be continued; shared: the same for
    one row of several, whose draft step the others pay for. drafts: of a lookup, for every row. explores: the exploration
    account pays. steps: that the decision stands for, as long as no lookup is worth more. stake: plain steps that one of them
    is expected to lose if no draft is accepted."""

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


@dataclass(slots=True)
class StepResult:
    """What became of a step, or of several plain ones. tokens: committed, of a batch the mean of its rows; all counts are.
    steps: that these are. drafts: that were scored. passes: draft steps. drafting, scoring: seconds of these; 0 if unknown.
    fixed: seconds of the policy itself. confidences: (confidence, accepted) of judged drafts. matches: (match, tokens of its
    continuation that are right, tokens that the text tells of). ranks: of one row's tokens among the kept ones. warm_steps,
    warm_seconds: plain steps behind enough others, and what one of them takes. preparing: the engine compiled something."""

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
    """Tokens and time of the latest steps, and of all of them, which other requests have shown."""

    tokens: float = 0.0
    time: float = 0.0
    steps: float = 0.0
    usual_tokens: float = 0.0
    usual_time: float = 0.0
    position: int = 0

    def add(self, position: int, tokens: float, time: float, steps: int = 1) -> None:
        self.fade(position)
        self.tokens += tokens
        self.time += time
        self.steps += steps
        self.usual_tokens += tokens
        self.usual_time += time

    def fade(self, position: int) -> None:
        passed, self.position = position - self.position, position
        keep, usual = 0.5 ** (passed / HALF_LIFE), 0.5 ** (passed / USUAL_HALF_LIFE)
        self.tokens, self.time, self.steps = self.tokens * keep, self.time * keep, self.steps * keep
        self.usual_tokens, self.usual_time = self.usual_tokens * usual, self.usual_time * usual

    def halve(self) -> None:
        """Another request begins."""
        self.tokens, self.time, self.steps = self.tokens / 2, self.time / 2, self.steps / 2

    @property
    def value(self) -> float:
        """Tokens a plain step."""
        usual = (self.usual_tokens + PRIOR_TIME) / (self.usual_time + PRIOR_TIME)
        return (self.tokens + PRIOR_TIME * usual) / (self.time + PRIOR_TIME)

    @property
    def upper_bound(self) -> float:
        return self.value * (1 + SPREAD / math.sqrt(self.steps + 1))


@dataclass(slots=True)
class DrafterState:
    """What is known of a drafter. seen_at, timed_at: positions at which it was replayed or drafted, and timed; None for not in
    this process. thresholds, shared: at price 1, from the position `priced_at`. searches: its replays are evaluations of a
    search, so they are cast whatever they cost."""

    rate: Rate = field(default_factory=Rate)
    acceptance: ConfidenceAcceptance = field(default_factory=ConfidenceAcceptance)
    seen_at: int | None = None
    timed_at: int | None = None
    thresholds: tuple[float, ...] = ()
    shared: tuple[float, ...] = ()
    priced_at: int = 0
    searches: bool = False

    @property
    def is_hopeless(self) -> bool:
        """Whether not even its first draft is worth its time."""
        return bool(self.thresholds) and self.thresholds[0] > 1


class Exploration(NamedTuple):
    """Something to measure. kind: PROBE, "replay" or "trial". value: tokens since it was measured, for each plain step."""

    value: float
    kind: str
    name: str
    cost: float


@dataclass(slots=True)
class Policy:
    """All that decisions rest on. `decide` and `next_replay` only read it; `observe`, `observe_replay`, `begin_request` and
    `resize` change it. So a list of events makes every decision again.

    rows: that decode. tree_rate: of recycled tokens. lookups: discounted tokens and time of lookups. current: the best drafter.
    trial: (drafter, steps left) of an exploration by drafting. surprises: steps in a row that took longer (or less long, if
    negative) than expected; surprised: whose steps these were.
    """

    costs: LearnedCosts
    drafters: dict[str, DrafterState]
    budget: RegretBudget = field(default_factory=RegretBudget)
    recycled: RankAcceptance | None = None
    tree_rate: Rate = field(default_factory=Rate)
    matches: MatchAcceptance = field(default_factory=MatchAcceptance)
    lookups: tuple[float, float] = (2 * PRIOR_TIME, PRIOR_TIME)
    rows: int = 1
    current: str | None = None
    position: int = 0
    chosen_at: int | None = None
    probed_at: int = 0
    host_timed_at: int | None = None
    stalled_at: int | None = None
    exploration: float = MAX_EXPLORATION
    trial: tuple[str, int] | None = None
    surprises: int = 0
    surprised: str = HOST
    starts_request: bool = True

    # ------------------------------------------------------------------------------------------------- decisions

    def decide(self, matches: Sequence[int] = ()) -> Decision:
        """What the next steps do. matches: of every row, tokens of the longest match of its end; empty if none is looked up."""
        current = self._choose()
        price = max(1.0, self._rate(current).value) if current is not None else 1.0
        if current is not None and self._is_hopeless(current):
            price = 1.0
        if self.costs.plain.measurements < TRIAL_STEPS:
            return Decision(PLAIN, current=current, reason="plain decoding is timed")
        if abs(self.surprises) > 1:
            return self._probe(current, price, "steps took longer, or less long, than expected: a plain step is measured")
        if self.budget.remaining <= 0:
            return self._wait(current, price, 0.0)
        return self._explore(current, price, matches) or self._look_up(current, price, matches) or self._draft(current, price)

    def stands(self, decision: Decision, matches: Sequence[int]) -> bool:
        """Whether a decision for several steps still holds, although there are matches now."""
        return not any(matches) or self._look_up(decision.current, decision.price, matches) is None

    def next_replay(self, lag: Mapping[str, int] | None = None) -> str | None:
        """The drafter to replay now; None for none. lag: drafter -> tokens that it would have to read."""
        if self.position < CHOOSE_EVERY or self.budget.remaining <= 0 or self.trial is not None:
            return None
        best = self._best_exploration(self._choose(), lag or {})
        return best.name if best is not None and best.kind == "replay" and self._can_pay(best.cost) else None

    def _can_pay(self, cost: float) -> bool:
        return self.exploration >= min(cost, MAX_EXPLORATION)

    def _names(self) -> list[str]:
        recycles = self.recycled is not None and self.recycled.tree is not None
        return [*self.drafters, RECYCLE] if recycles else list(self.drafters)

    def _rate(self, name: str) -> Rate:
        return self.tree_rate if name == RECYCLE else self.drafters[name].rate

    def _is_hopeless(self, name: str) -> bool:
        return name in self.drafters and self.drafters[name].is_hopeless

    def _choose(self) -> str | None:
        """The best drafter, None for plain decoding."""
        names = self._names()
        current = self.current if self.current in names else None
        if self.current == current and self.chosen_at is not None and self.position - self.chosen_at < CHOOSE_EVERY:
            return current
        best = max(names, key=lambda name: self._rate(name).value, default=None)
        rate = 1.0 if current is None else self._rate(current).value
        if best is not None and self._rate(best).value > max(rate, 1.0) * (1 + MARGIN):
            return best
        if current is None:
            return None
        limit = 1 + MARGIN if self._is_hopeless(current) else 1 - MARGIN
        return current if rate > limit else None

    def _probe(self, current: str | None, price: float, reason: str) -> Decision:
        return Decision(PROBE, price, current, reason, steps=PROBE_STEPS, explores=True)

    def _wait(self, current: str | None, price: float, amount: float) -> Decision:
        """Plain steps until so much may be lost."""
        steps = self.budget.steps_until(amount, WINDOW if current is not None else PLAIN_AT_ONCE)
        return Decision(PLAIN, price, current, "more time was lost than may be: plain until it is won back", steps=steps)

    def _draft(self, current: str | None, price: float) -> Decision:
        """What the best drafter does."""
        if current is None:
            steps = PLAIN_AT_ONCE if self.exploration < 1.5 else WINDOW
            return Decision(PLAIN, price, None, "nothing is faster than plain decoding", steps=steps)
        if self._is_hopeless(current):
            return Decision(PLAIN, price, current, f"{current} is right too seldom to be worth a draft", steps=COLD_STEPS + 2)
        reason = f"{current}: {price:.2f} x plain decoding"
        if current == RECYCLE:
            assert self.recycled is not None
            assert self.recycled.tree is not None
            wanted = Decision(RECYCLE, price, current, reason, tree=self.recycled.tree)
        elif current in self.costs.schedules:
            wanted = Decision(current, price, current, reason)
        else:
            own = self.drafters[current]
            later = [one * price for one in own.thresholds[1:]]
            shared = tuple([one * price for one in own.shared])
            steps = STEPS_AT_ONCE if self.costs.measurements(current) >= WELL_KNOWN else 1
            wanted = Decision(current, price, current, reason, (*own.thresholds[:1], *later), shared, steps=steps)
        return self._affordable(wanted) or self._wait(current, price, self._stake(wanted, 1))

    def _stake(self, decision: Decision, drafts: float) -> float:
        """Plain steps that a step loses if none of so many drafts is accepted."""
        costs = self.costs.of(decision.kind)
        return costs.step(drafts if decision.kind in self.drafters else 0, drafts + 1) - 1

    def _affordable(self, decision: Decision) -> Decision | None:
        """The same with no more drafts and steps than the budget pays for, None if that is none."""
        remaining, kept = self.budget.remaining, decision
        if decision.tree is not None:
            stake = self._stake(decision, len(decision.tree.ranks))
        elif decision.drafts:
            drafts = list(decision.drafts)
            while (stake := self._stake(decision, sum(drafts) / len(drafts))) > remaining and max(drafts) > 1:
                drafts[drafts.index(max(drafts))] -= 1
            kept = decision._replace(drafts=tuple(drafts))
        else:
            drafts = len(decision.thresholds)
            least = TRIAL_STEPS - 1 if decision.explores else 1
            while (stake := self._stake(decision, drafts)) > remaining and drafts > least:
                drafts -= 1
            kept = decision._replace(thresholds=decision.thresholds[:drafts], shared=decision.shared[:drafts])
        if stake > remaining:
            return None
        steps = decision.steps if stake * decision.steps <= remaining else int(remaining / stake)
        return kept._replace(steps=steps, stake=stake)

    def _look_up(self, current: str | None, price: float, matches: Sequence[int]) -> Decision | None:
        """A lookup that gains more than the current drafter does in the same time. A longer one is worth its scoring at the
        rate of lookups: copied text is not there in the next step as well."""
        if not any(matches):
            return None
        rows, scoring = len(matches), self.costs.scoring[HOST]
        survivals = [self.matches.predict(match, scoring.max_drafts) if match else [] for match in matches]
        length_price = max(price, self.lookups[0] / self.lookups[1])
        drafts = best_drafts(survivals, length_price, scoring if rows == 1 else lambda n: rows * scoring(n / rows))
        accepted = [one for chain, kept in zip(survivals, drafts, strict=True) for one in chain[:kept]]
        tokens, scored = expected_tokens(accepted) if rows == 1 else 1 + sum(accepted) / rows, 1 + sum(drafts) / rows
        if tokens <= price * self.costs.of(LOOKUP).step(0, scored):
            return None
        reason = f"a match of {max(matches)}: {tokens:.1f} tokens expected"
        return self._affordable(Decision(LOOKUP, price, current, reason, drafts=tuple(drafts)))

    # ------------------------------------------------------------------------------------------------- exploration

    def _explore(self, current: str | None, price: float, matches: Sequence[int]) -> Decision | None:
        """A step that measures something; None where nothing is to be measured, or nothing pays for it."""
        if self.trial is not None:
            return self._affordable(self._try(self.trial[0], current, price))
        if (
            self.exploration >= COLD_LOSS
            and self._is_old(HOST)
            and (trial := self._try_host(current, price, matches)) is not None
        ):
            return self._affordable(trial)
        best = self._best_exploration(current, {})
        if best is None or best.kind == "replay" or not self._can_pay(best.cost):
            return None
        if best.kind == PROBE:
            return self._probe(current, price, "a plain step is measured")
        return self._affordable(self._try(best.name, current, price))

    def _try(self, name: str, current: str | None, price: float) -> Decision:
        thresholds = () if name in self.costs.schedules else TRIAL_THRESHOLDS
        return Decision(name, price, current, f"{name} is tried", thresholds, explores=True)

    def _try_host(self, current: str | None, price: float, matches: Sequence[int]) -> Decision | None:
        """A short lookup, or a short tree of recycled tokens if nothing is looked up."""
        reason = "the scoring of lookups and recycled tokens is timed"
        if any(matches):
            drafts = tuple(2 * min(match, 1) for match in matches)
            return Decision(LOOKUP, price, current, reason, drafts=drafts, explores=True)
        if self.recycled is None or matches or self.position < CHOOSE_EVERY:
            return None
        return Decision(RECYCLE, price, current, reason, tree=RankTree((-1, 0), (0, 0), 1.0), explores=True)

    def _is_old(self, name: str) -> bool:
        """Whether a drafter was timed long ago, or not in this process."""
        timed_at = self.host_timed_at if name == HOST else self.drafters[name].timed_at
        few = self.costs.measurements(name) < TRIAL_STEPS
        return timed_at is None or self.position - timed_at > (HALF_LIFE if few else AGAIN)

    def _best_exploration(self, current: str | None, lag: Mapping[str, int]) -> Exploration | None:
        """What is worth most for its cost: the tokens since it was measured last, for each plain step that measuring takes."""
        return max(self._explorations(current, lag), default=None)

    def _explorations(self, current: str | None, lag: Mapping[str, int]) -> Iterable[Exploration]:
        best = max([1.0, *(self._rate(name).value for name in self._names())])
        price = 1.0 if current is None else max(1.0, self._rate(current).value)
        if current is not None and self.position - self.probed_at > PLAIN_AT_ONCE:
            cost = PROBE_STEPS * (1 - 1 / price) + COLD_LOSS
            yield Exploration((self.position - self.probed_at) / cost, PROBE, PLAIN, cost)
        for name, one in self.drafters.items():
            if name == current and not one.is_hopeless:
                continue
            age = AGAIN + self.position if one.seen_at is None else self.position - one.seen_at
            is_unknown = one.rate.steps < TRIAL_STEPS
            replay = self.costs.replays.get(name)
            replayed = replay is not None and (replay.value < 1.5 or one.searches)
            hopes = (one.rate.upper_bound > best or age > AGAIN) and age >= (WINDOW / 2 if is_unknown else WINDOW)
            if replay is not None and replayed and hopes:
                cost = replay.value * max(lag.get(name, 0) / WINDOW, 1.0)
                yield Exploration(age * (TRIAL_STEPS if is_unknown else 1) / cost, "replay", name, cost)
            if (hopes and not replayed) or (self._is_old(name) and self._potential(name) > best):
                since = AGAIN + self.position if one.timed_at is None else self.position - one.timed_at
                cost = self._trial_cost(name, price)
                is_first = one.timed_at is None and not is_unknown
                yield Exploration(math.inf if is_first else max(since, 0 if replayed else age) / cost, "trial", name, cost)

    def _trial_cost(self, name: str, price: float) -> float:
        """Plain steps that an exploration by drafting is expected to lose."""
        costs, drafts = self.costs.of(name), TRIAL_STEPS
        if name in self.costs.schedules:
            return max(costs.step(0) - 1, COLD_LOSS / 2)
        accepted = self.drafters[name].acceptance.mean
        tokens = expected_tokens([accepted**n for n in range(1, drafts + 1)])
        return max(TRIAL_STEPS * (costs.step(drafts) - tokens / price), COLD_LOSS / 2)

    def _potential(self, name: str) -> float:
        """The speed-up of a drafter whose costs are believed to be too high."""
        costs, one = self.costs.of(name), self.drafters[name]
        doubt = COST_DOUBT if one.timed_at is None else math.sqrt(COST_DOUBT)
        if name in self.costs.schedules:
            return one.rate.upper_bound
        survivals, best = [one.acceptance.mean**n for n in range(1, LOOKAHEAD + 1)], 0.0
        for drafts in range(1, LOOKAHEAD + 1):
            scoring = costs.scoring(drafts + 1)
            rest = costs.step(drafts) - scoring
            best = max(best, expected_tokens(survivals[:drafts]) / (rest / doubt + max(scoring / doubt, min(scoring, 1.0))))
        return best

    # ------------------------------------------------------------------------------------------------- learning

    def begin_request(self) -> None:
        """A request begins where none is running: what was learnt of others counts half."""
        self.budget.begin_request()
        self.tree_rate.halve()
        for one in self.drafters.values():
            one.rate.halve()
        self.starts_request = True

    def observe(self, decision: Decision, results: Sequence[StepResult]) -> None:
        """The steps of a decision were taken. kind: PLAIN if there was nothing to draft."""
        kind, plain = decision.kind, self.costs.plain.value
        tokens, seconds = sum([one.tokens for one in results]), sum([one.seconds for one in results])
        self.chosen_at = self.position if self.current != decision.current or self._chooses else self.chosen_at
        self.current = decision.current
        time = seconds / plain
        if kind in (PLAIN, PROBE):
            time = self._observe_plain(decision, results)
        else:
            expected = sum([self._expected(kind, one) for one in results])
            time = self._charged(time, expected, any(one.preparing for one in results))
            self._observe_drafting(decision, results, seconds / plain, expected, time)
        self.budget.charge(time, tokens)
        for one in results:
            for match in one.matches:
                self.matches.observe(*match)
        if self.recycled is not None:
            self._observe_ranks(kind, [rank for one in results for rank in one.ranks], tokens, time)
        lost = (time - tokens / decision.price) if decision.explores else 0.0
        share = EXPLORATION_SHARE + 2 * EXPLORATION_SHARE / (1 + self.position / HALF_LIFE)
        self.exploration = min(self.exploration + share * time - lost, MAX_EXPLORATION)
        self.position += round(tokens)
        self.starts_request = False
        self._price()

    @property
    def _chooses(self) -> bool:
        return self.chosen_at is None or self.position - self.chosen_at >= CHOOSE_EVERY

    def _expected(self, kind: str, result: StepResult) -> float:
        costs = self.costs.of(kind)
        return costs.step(result.passes if kind in self.drafters else 0, result.drafts + 1)

    def _charged(self, time: float, expected: float, preparing: bool) -> float:
        """The time of steps that is charged. What the engine compiled is no step's fault, and a stall is seldom one's; the
        first step of a request finds caches that the prompt has filled, as a plain one would."""
        if preparing or self.starts_request:
            return min(time, max(expected, 1.0))
        is_rare = self.stalled_at is None or self.position - self.stalled_at > HALF_LIFE
        if time > 2 * expected and is_rare:
            self.stalled_at = self.position
            return 2 * expected
        return time

    def _observe_plain(self, decision: Decision, results: Sequence[StepResult]) -> float:
        """After plain steps: one each, but what those behind a draft take more. Returns their time."""
        steps, warm = sum([one.steps for one in results]), [one for one in results if one.warm_steps]
        cold = steps - sum([one.warm_steps for one in warm])
        excess = sum([one.seconds - one.warm_steps * one.warm_seconds for one in results]) / self.costs.plain.value - cold
        if self.costs.plain.measurements < TRIAL_STEPS:
            self.costs.plain.observe(sum([one.seconds for one in results]) / steps)
            return float(steps)
        if warm:
            seconds = sum([one.warm_steps * one.warm_seconds for one in warm]) / (steps - cold)
            self._observe_plain_step(seconds)
            if decision.kind == PROBE:
                self.probed_at = self.position
        if decision.current in self.drafters and self.drafters[decision.current].is_hopeless:
            self.drafters[decision.current].rate.add(self.position, steps, steps, steps)
        return steps + min(max(excess, 0.0), COLD_LOSS * cold)

    def _observe_plain_step(self, seconds: float) -> None:
        """A warm plain step takes so long. It tells whether the machine or the drafter has surprised."""
        plain = self.costs.plain
        factor = seconds / plain.value
        if abs(self.surprises) > 1:
            agrees = factor**2 > CHANGED if self.surprises > 0 else factor**2 < 1 / CHANGED
            if agrees:
                plain.value = seconds
            else:
                self.costs.doubt(self.surprised)
            self.surprises = 0
        plain.observe(seconds)

    def _observe_drafting(
        self, decision: Decision, results: Sequence[StepResult], taken: float, expected: float, time: float
    ) -> None:
        """After steps that drafted. taken, expected: their time. time: that is charged."""
        kind, last, tokens = decision.kind, results[-1], sum([one.tokens for one in results])
        preparing = any(one.preparing for one in results)
        timed = not decision.explores or self._counts(kind)
        if timed and not preparing:
            self._watch(kind, taken / expected)
            if abs(self.surprises) < 2:
                self._time(kind, last)
        if kind == LOOKUP:
            keep = 1 - 1 / WINDOW
            self.lookups = self.lookups[0] * keep + tokens, self.lookups[1] * keep + time
        if kind in self.drafters:
            one = self.drafters[kind]
            for result in results:
                one.acceptance.observe(result.confidences)
            one.rate.add(self.position, tokens, time, len(results))
            one.seen_at = self.position + round(tokens)
        if decision.explores and kind in self.drafters:
            self.chosen_at = None

    def _counts(self, kind: str) -> bool:
        """Whether this step of an exploration is the last one, and counts down."""
        if kind not in self.drafters or kind in self.costs.schedules:
            return True
        left = self.trial[1] if self.trial is not None and self.trial[0] == kind else TRIAL_STEPS
        self.trial = (kind, left - 1) if left > 1 else None
        return left <= 1

    def _watch(self, kind: str, factor: float) -> None:
        """Two surprises in a row ask for a probe. factor: of the time that was expected."""
        if self.starts_request or 1 / CHANGED < factor < CHANGED:
            self.surprises = 0
        else:
            sign = 1 if factor > 1 else -1
            self.surprises = self.surprises + sign if self.surprises * sign > 0 else sign
            self.surprised = kind if kind in self.drafters else HOST

    def _time(self, kind: str, result: StepResult) -> None:
        """What a step says of costs."""
        costs, plain, name = self.costs, self.costs.plain.value, kind if kind in self.drafters else HOST
        if (self.host_timed_at if name == HOST else self.drafters[name].timed_at) is None:
            costs.doubt(name)
        if kind in costs.schedules:
            costs.schedules[kind].observe(result.seconds / plain)
        else:
            if result.scoring and result.drafts:
                costs.observe_scoring(name, result.drafts + 1, result.scoring / plain, self.host_timed_at is None)
            if result.drafting and result.passes:
                costs.observe_drafting(name, result.passes, result.drafting / plain)
            costs.fixed += (result.fixed / plain - costs.fixed) / CHOOSE_EVERY
        if name == HOST:
            self.host_timed_at = self.position
        else:
            self.drafters[name].timed_at = self.position

    def _observe_ranks(self, kind: str, ranks: Sequence[int], tokens: float, time: float) -> None:
        """What steps say of recycled tokens. Copied text is not theirs to draft."""
        assert self.recycled is not None
        if kind == LOOKUP and tokens >= COPIED:
            return
        self.recycled.observe(ranks)
        if kind == RECYCLE:
            self.tree_rate.add(self.position, tokens, time)
            self.recycled.pending.clear()
        elif self.recycled.tree is not None:
            of_tree = self.costs.of(RECYCLE).step(0, len(self.recycled.tree.ranks) + 1)
            for virtual in self.recycled.decode_virtually():
                self.tree_rate.add(self.position, virtual, of_tree)
        if self.position >= CHOOSE_EVERY:
            table = self.costs.scoring[HOST].table[: self.costs.scoring[HOST].max_drafts + 2]
            self.recycled.build(self.position, max(1.0, self.tree_rate.value), table)

    def _price(self) -> None:
        """The current drafter's thresholds, where they are old."""
        name = self.current
        if name not in self.drafters or name in self.costs.schedules:
            return
        own = self.drafters[name]
        if not own.thresholds or self.position - own.priced_at > min(2 * WINDOW, own.rate.steps):
            self._price_drafter(name)

    def _price_drafter(self, name: str) -> None:
        own, costs, scoring = self.drafters[name], self.costs.of(name), self.costs.scoring_of(name)
        mean, most = own.acceptance.mean, min(MAX_DRAFTS, scoring.max_drafts)
        own.thresholds = tuple(stop_thresholds(costs.draft_step, costs.fixed + costs.start, scoring, mean, 1.0, most))
        own.shared = tuple(stop_thresholds(0.0, 0.0, scoring, mean, 1.0, most)) if self.rows > 1 else ()
        own.priced_at = self.position

    def observe_replay(
        self, name: str, confidences: Sequence[float], right: Sequence[bool], seconds: float = 0.0, read: int = 0
    ) -> None:
        """A drafter was replayed on the latest committed tokens, which it now decodes virtually with its own thresholds.

        confidences, right: of every token; none where they say nothing of what it drafts now. seconds: that it took, 0 if
        unknown. read: tokens that it had to read.
        """
        one, windows = self.drafters[name], max(read / WINDOW, 1.0)
        if seconds:
            time = seconds / self.costs.plain.value
            self.costs.replays[name].observe(time / windows)
            self.exploration -= time
            self.budget.charge(time, 0.0)
        one.seen_at, self.chosen_at = self.position, None
        if not right:
            return
        one.acceptance.observe(zip(confidences, right, strict=True))
        self._price_drafter(name)
        price, costs, place = max(1.0, one.rate.value), self.costs.of(name), 0
        thresholds = (*one.thresholds[:1], *[each * price for each in one.thresholds[1:]])
        while place < len(right):
            survival, drafts, accepted, good = 1.0, 0, 0, True
            while place + drafts < len(right) and drafts < len(thresholds) and survival >= thresholds[drafts]:
                survival *= one.acceptance.predict(confidences[place + drafts])
                good = good and right[place + drafts]
                accepted, drafts = accepted + good, drafts + 1
            one.rate.add(self.position, accepted + 1, costs.step(drafts) if drafts else 1.0)
            place += accepted + 1
