"""Which drafter, how long a draft, or none: `decide` and `observe`, a fold over steps.

Every drafter is held against plain decoding by the text that is known by now: with its own stopping rule and the measured
costs, how many tokens would it have committed in how much time? That is its rate, in tokens a plain step (plain decoding's is
1). The drafter that drafts is graded by what it did; others by `shadow`, on what the verification left behind; lookups and
recycled tokens by `observe`, on the host. So nothing has to be tried to be known, as long as shadows are paid: they have an
account of their own, a share of the time, which is never overdrawn.

Times are in plain steps. Positions count the committed tokens of a session, of a batch the mean of its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache

from skipstone.control import price
from skipstone.control.calibrate import PRIOR_WEIGHT, Logistic, Matches
from skipstone.control.costs import Costs
from skipstone.control.ledger import Ledger
from skipstone.control.price import RankTree

PLAIN, PROBE, LOOKUP, RECYCLE = "plain", "probe", "lookup", "recycle"
"""What a step does that is no model's draft. A probe is a plain step that is taken to measure one."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The constants. half_life: tokens after which a step counts half in its drafter's rate, usual_half_life: in its usual
    rate. kept: share of the rate that a new request leaves. shadowing: share of the time that shadows may take; calm_shadowing
    where nothing has moved for calm_after tokens. window: tokens that a shadow grades. plain_probing: share of the time that
    plain probes may lose, plain_spacing tokens apart. margin: by how much another drafter's rate must be larger to take over.
    most_drafts: a step. listening: tokens that are decoded plainly at first. look_again: tokens after which a drafter is graded
    whatever its rate is. prior: plain steps at its usual rate that a rate begins with, and at rate 1 that a usual rate begins
    with. most_nodes, depth: of a tree of recycled tokens."""

    half_life: float = 300.0
    usual_half_life: float = 4000.0
    kept: float = 0.5
    shadowing: float = 0.005
    calm_shadowing: float = 0.0025
    calm_after: int = 1500
    window: int = 32
    plain_probing: float = 0.004
    plain_spacing: int = 128
    margin: float = 0.02
    most_drafts: int = 25
    listening: int = 16
    look_again: int = 1500
    prior: float = 8.0
    most_nodes: int = 63
    depth: int = 8


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens, time and steps of a drafter, of which older ones count less. at: the position up to which they have faded."""

    tokens: float = 0.0
    time: float = 0.0
    steps: float = 0.0
    at: int = 0

    def faded(self, now: int, half_life: float) -> "Rate":
        keep = 0.5 ** ((now - self.at) / half_life)
        return Rate(self.tokens * keep, self.time * keep, self.steps * keep, now)

    def add(self, tokens: float, time: float, steps: float = 1.0) -> "Rate":
        return Rate(self.tokens + tokens, self.time + time, self.steps + steps, self.at)

    def cut(self, keep: float) -> "Rate":
        return Rate(self.tokens * keep, self.time * keep, self.steps * keep, self.at)


@dataclass(frozen=True, slots=True)
class Rates:
    """A drafter's rate now, and its usual one, which other requests have shown and which it has until the running one tells."""

    now: Rate = Rate()
    usual: Rate = Rate()

    def add(self, position: int, tokens: float, time: float, rules: "Rules") -> "Rates":
        """One more step at a position."""
        now = self.now.faded(position, rules.half_life).add(tokens, time)
        return Rates(now, self.usual.faded(position, rules.usual_half_life).add(tokens, time))

    def cut(self, keep: float) -> "Rates":
        """Another request begins."""
        return Rates(self.now.cut(keep), self.usual)

    def value(self, position: int, rules: "Rules") -> float:
        """Tokens a plain step."""
        prior, usual = rules.prior, self.usual.faded(position, rules.usual_half_life)
        expected = (usual.tokens + prior) / (usual.time + prior)
        now = self.now.faded(position, rules.half_life)
        return (now.tokens + prior * expected) / (now.time + prior)


@dataclass(frozen=True, slots=True)
class Drafter:
    """What is known of a drafter. seen: the position up to which it was graded. timed: that at which it was timed last.
    thresholds: of survival, as `price.thresholds` has them, worked out at the position `thresholds_at` for the price
    `thresholds_price`."""

    rate: Rates = Rates()
    calibration: Logistic = field(default_factory=Logistic)
    seen: int = 0
    timed: int = 0
    thresholds: tuple[float, ...] = ()
    thresholds_at: int = -1000
    thresholds_price: float = 1.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """How often the token that was kept first, second, ... for a token followed it, and the tree that is drafted by that.
    pending: ranks of committed tokens that the tree was not graded on yet."""

    hits: tuple[float, ...] = (8.0, 3.0, 2.0, 1.0, 0.6)
    count: float = 20.0
    tree: RankTree | None = None
    tree_at: int = -1000
    rate: Rates = Rates()
    pending: tuple[int, ...] = ()

    def seen(self, ranks: Sequence[int]) -> "Ranks":
        """So many committed tokens more."""
        hits, count = list(self.hits), self.count
        for rank in ranks:
            count = count * KEPT_RANKS + 1
            hits = [one * KEPT_RANKS for one in hits]
            if rank < len(hits):
                hits[rank] += 1
        return replace(self, hits=tuple(hits), count=count, pending=(*self.pending, *ranks)[-MOST_PENDING:])

    def drawn(self, tree: RankTree, position: int) -> "Ranks":
        """With another tree."""
        return replace(self, tree=tree if tree.parents else None, tree_at=position)

    def graded(self, position: int, costs: Costs, rules: Rules) -> "Ranks":
        """The tree decodes the pending tokens virtually."""
        if self.tree is None:
            return self
        rate, pending, below = self.rate, self.pending, _children(self.tree)
        time = costs.scoring(len(self.tree.parents) + 1) + costs.fixed + costs.lookup
        while len(pending) > rules.depth + 1:
            node, accepted = -1, 0
            while (node := below.get((node, pending[accepted]), -2)) >= 0:
                accepted += 1
            rate, pending = rate.add(position, accepted + 1, time, rules), pending[accepted + 1 :]
        return replace(self, rate=rate, pending=pending)


@cache
def _children(tree: RankTree) -> dict[tuple[int, int], int]:
    """(node, rank) -> the node below it; -1 is the last committed token."""
    return {key: node for node, key in enumerate(zip(tree.parents, tree.ranks, strict=True))}


RETIMED_AFTER = 1000
"""Tokens after which a cost is measured again, where nothing else did: what is thought too dear is not done otherwise."""
MOST_SAVED = 4.0
"""Plain steps that are saved for shadows at most."""
LOOKUPS_KEPT = 0.97
"""Of the rate of lookups, by a step that looks up."""
TRIED = 2
"""Drafts of a step that is taken to time a draft step."""
PROMISING = 0.3
"""Mean acceptance from which on a drafter is worth being timed."""
KEPT_RANKS = 0.998
"""Of a count of ranks, by a token."""
NEW_TREE = 200
"""Tokens after which the tree of recycled tokens is made anew."""
MOST_PENDING = 64
"""Ranks that wait to be graded."""


@dataclass(frozen=True, slots=True)
class State:
    """All that a session's decisions rest on. current: the drafter that drafts, where nothing else does. position: committed
    tokens. moved_at, scored, probed_at: positions at which the drafter changed, at which scoring what is looked up or recycled
    was timed, and at which a plain step was measured. shadow_account, probe_account: plain steps that may be spent."""

    costs: Costs
    drafters: Mapping[str, Drafter]
    rules: Rules = Rules()
    ledger: Ledger = field(default_factory=Ledger)
    matches: Matches = field(default_factory=Matches)
    lookups: Rate = Rate(24.0, 10.0)
    ranks: Ranks | None = None
    current: str | None = None
    position: int = 0
    moved_at: int = 0
    scored: int = 0
    probed_at: int = 0
    shadow_account: float = 1.0
    probe_account: float = 0.0

    def rate(self, name: str) -> float:
        """Of a drafter, in tokens a plain step."""
        own = self.ranks.rate if name == RECYCLE and self.ranks else self.drafters[name].rate
        return own.value(self.position, self.rules)

    def rates(self) -> dict[str, float]:
        """Of all drafters that could draft now."""
        found = {name: self.rate(name) for name in self.drafters}
        if self.ranks is not None and self.ranks.tree is not None:
            found[RECYCLE] = self.rate(RECYCLE)
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step does, and why. kind: PLAIN, PROBE, LOOKUP, RECYCLE or the name of a drafter. price: tokens that a plain step
    is worth. current: the drafter that the step was weighed against. thresholds: of a drafter. drafts: of a lookup, one number
    a row. tree: of recycled tokens. trial: the drafter drafts to have its draft step timed, and the account of shadows pays."""

    kind: str
    price: float
    current: str | None
    reason: str
    thresholds: tuple[float, ...] = ()
    drafts: tuple[int, ...] = ()
    tree: RankTree | None = None
    trial: bool = False


@dataclass(frozen=True, slots=True)
class Judged:
    """A match before a step and what the text says of it now. match: its tokens. right: tokens of its continuation that the
    text has, up to the first that it has not. looked_up: tokens of its continuation that the text could tell of."""

    match: int
    right: int
    looked_up: int


@dataclass(frozen=True, slots=True)
class Done:
    """What became of a step, of a batch the mean of its rows where a figure is one number. tokens: committed. seconds: of all
    of it. confidences: of a drafter's tokens that were judged, each with whether it was accepted. verified: drafts that were
    scored. draft_step, scoring: seconds of one draft step, and of the step without its draft steps; None where they were not
    measured. matches: of every row that had one. ranks: of every committed token of one row, its place among those that were
    kept for the one before it, beyond all for one that was not. shadow_seconds: spent on shadows before the step."""

    tokens: float
    seconds: float
    confidences: Sequence[tuple[float, bool]] = ()
    verified: int = 0
    draft_step: float | None = None
    scoring: float | None = None
    matches: Sequence[Judged] = ()
    ranks: Sequence[int] = ()
    shadow_seconds: float = 0.0


# ------------------------------------------------------------------------------------------------------ deciding


def decide(state: State, matches: Sequence[int] = ()) -> Plan:
    """What the next step does. matches: of every row, tokens of the longest match of its end in what stands before, 0 for none;
    empty where nothing is looked up."""
    rates, rules = state.rates(), state.rules
    best = max(rates, key=lambda name: rates[name], default=None)
    current = state.current if state.current in rates else None
    best_rate = max(rates[best], 1.0) if best is not None else 1.0
    if best_rate > (rates[current] if current is not None else 1.0) * (1 + rules.margin):
        current = best
    elif current is not None and rates[current] * (1 + rules.margin) < 1.0:
        current = None
    worth = max(1.0, rates[current]) if current is not None else 1.0
    if state.ledger.overdrawn:
        return Plan(PLAIN, worth, current, "more time was lost than may be: plain until it is won back")
    if current is not None and _probe_is_due(state, worth):
        return Plan(PROBE, worth, current, "a plain step is measured")
    if (name := _untimed(state)) is not None:
        return Plan(name, worth, current, f"a draft step of {name} is timed", thresholds=(0.0,) * TRIED, trial=True)
    if (trial := _lookup_trial(state, matches)) is not None:
        return replace(trial, price=worth, current=current)
    if any(matches) and (found := _lookup(state, matches, worth)) is not None:
        drafts, tokens = found
        return Plan(LOOKUP, worth, current, f"a match of {max(matches)}: {tokens:.1f} tokens expected", drafts=tuple(drafts))
    if current is None:
        return Plan(PLAIN, worth, None, "nothing is faster than plain decoding")
    reason = f"{current}: {worth:.2f} x plain decoding"
    if current == RECYCLE:
        assert state.ranks is not None
        return Plan(RECYCLE, worth, current, reason, tree=state.ranks.tree)
    return Plan(current, worth, current, reason, thresholds=state.drafters[current].thresholds)


def _untimed(state: State) -> str | None:
    """A drafter that is right often enough to be looked at, whose draft step is but guessed or was timed long ago, where a
    trial can be paid."""
    for name, drafter in state.drafters.items():
        cost, calibration = state.costs.drafts[name], drafter.calibration
        old = not cost.measurements or (name != state.current and state.position - drafter.timed > RETIMED_AFTER)
        graded, promising = calibration.weight > PRIOR_WEIGHT, calibration.mean >= PROMISING
        if old and graded and promising and state.shadow_account >= min(TRIED * cost.value, 1.0):
            return name
    return None


def _lookup_trial(state: State, matches: Sequence[int]) -> Plan | None:
    """A lookup that is taken to time its scoring, where that was long ago and a trial can be paid."""
    if not any(matches) or state.position - state.scored <= RETIMED_AFTER or state.shadow_account < 1:
        return None
    drafts = tuple(TRIED if match else 0 for match in matches)
    return Plan(LOOKUP, 1.0, state.current, "the scoring of a lookup is timed", drafts=drafts, trial=True)


def _probe_is_due(state: State, worth: float) -> bool:
    spaced = state.position - state.probed_at > state.rules.plain_spacing
    return spaced and state.probe_account >= 1 - 1 / worth


def _lookup(state: State, matches: Sequence[int], worth: float) -> tuple[list[int], float] | None:
    """How much of every row's match to draft, and the tokens that a row is expected to commit, where that gains more than the
    current drafter does in the same time. A longer draft is worth its scoring at the rate of lookups: what is copied belongs to
    the text and is not there in the next step as well."""
    rows, costs = len(matches), state.costs
    length_price = max(worth, state.lookups.tokens / state.lookups.time)
    survival = [price.survivals(state.matches.predict(match)) if match else [] for match in matches]
    drafts = price.allocate(survival, length_price, lambda tokens: rows * costs.scoring(tokens / rows))
    tokens = 1 + sum(sum(chain[:kept]) for chain, kept in zip(survival, drafts, strict=True)) / rows
    time = costs.scoring(1 + sum(drafts) / rows) + costs.fixed + costs.lookup
    return (drafts, tokens) if tokens > worth * time else None


# ---------------------------------------------------------------------------------------------------- what is learnt


def begin(state: State) -> State:
    """A request begins: what was learnt of others counts half."""
    keep = state.rules.kept
    drafters = {name: replace(one, rate=one.rate.cut(keep)) for name, one in state.drafters.items()}
    ranks = None if state.ranks is None else replace(state.ranks, rate=state.ranks.rate.cut(keep))
    return replace(state, drafters=drafters, ranks=ranks, ledger=state.ledger.begin())


def observe(state: State, plan: Plan, done: Done) -> State:
    """The step that was planned has been taken. A plain step tells what a plain step takes, and loses nothing."""
    rules, costs, now = state.rules, state.costs, state.position + round(done.tokens)
    if plan.kind in (PLAIN, PROBE):
        costs = replace(costs, plain=costs.plain.observe(done.seconds))
    plain = costs.plain.value
    time, shadow_time = done.seconds / plain if plan.kind not in (PLAIN, PROBE) else 1.0, done.shadow_seconds / plain
    drafters, surprised = dict(state.drafters), False
    if done.scoring is not None and done.verified:
        costs = costs.scored(plan.kind if plan.kind in drafters else None, done.verified + 1, done.scoring / plain)
    if plan.kind in drafters:
        if done.draft_step is not None:
            costs = costs.drafted(plan.kind, done.draft_step / plain)
        drafters[plan.kind] = _drafted(drafters[plan.kind], state.position, done, time, rules)
        surprised = bool(costs.drafts[plan.kind].surprises) or costs.scoring_of(plan.kind).surprises(done.verified + 1)
        if not surprised:  # else it is timed once more: two surprises in a row are believed
            drafters[plan.kind] = replace(drafters[plan.kind], timed=now)
    elif done.verified:
        surprised = costs.scoring.surprises(done.verified + 1)
    lookups = state.lookups
    if plan.kind == LOOKUP:
        lookups = Rate(lookups.tokens * LOOKUPS_KEPT + done.tokens, lookups.time * LOOKUPS_KEPT + time)
    matches = state.matches
    for one in done.matches:
        matches = matches.observe(one.match, one.right, one.looked_up)
    moved = now if plan.current != state.current else state.moved_at
    shadowing = rules.calm_shadowing if now - moved > rules.calm_after else rules.shadowing
    probed = plan.kind == PROBE
    paid = max(time - done.tokens, 0.0) if plan.trial else 0.0
    after = replace(
        state,
        costs=costs,
        drafters=drafters,
        ledger=state.ledger.add(time + shadow_time, done.tokens),
        matches=matches,
        lookups=lookups,
        current=plan.current,
        position=now,
        moved_at=moved,
        scored=now if plan.kind in (LOOKUP, RECYCLE) and not surprised else state.scored,
        probed_at=state.position if probed else state.probed_at,
        shadow_account=min(state.shadow_account - paid + shadowing * time, MOST_SAVED),
        probe_account=min(state.probe_account + rules.plain_probing * time - (1 - 1 / plan.price if probed else 0.0), 1.0),
    )
    if after.ranks is not None:
        after = replace(after, ranks=_recycled(after, done))
    return _with_thresholds(after)


def _drafted(drafter: Drafter, position: int, done: Done, time: float, rules: Rules) -> Drafter:
    calibration = drafter.calibration
    for confidence, accepted in done.confidences:
        calibration = calibration.observe(confidence, float(accepted))
    rate = drafter.rate.add(position, done.tokens, time, rules)
    return replace(drafter, rate=rate, calibration=calibration, seen=position + round(done.tokens))


def _recycled(state: State, done: Done) -> Ranks:
    """Ranks after a step, and the tree where it is due."""
    assert state.ranks is not None
    rules, ranks = state.rules, state.ranks.seen(done.ranks)
    if state.position > rules.listening and (ranks.tree is None or state.position - ranks.tree_at > NEW_TREE):
        worth, chances = max(1.0, state.rate(RECYCLE)), [one / ranks.count for one in ranks.hits]
        found = price.tree(chances, worth, state.costs.scoring, most=rules.most_nodes, depth=rules.depth)
        ranks = ranks.drawn(found, state.position)
    return ranks.graded(state.position, state.costs, rules)


def _with_thresholds(state: State) -> State:
    """The current drafter's thresholds, anew where they are old or the price has moved."""
    name = state.current
    if name is None or name not in state.drafters:
        return state
    own, worth = state.drafters[name], max(1.0, state.rate(name))
    if own.thresholds and state.position - own.thresholds_at <= 16 and abs(worth / own.thresholds_price - 1) <= 0.03:
        return state
    return replace(state, drafters={**state.drafters, name: _priced(state, name, worth)})


def _priced(state: State, name: str, worth: float) -> Drafter:
    own, costs = state.drafters[name], state.costs
    step = costs.drafts[name].value
    found = price.thresholds(step, costs.fixed, costs.scoring_of(name), own.calibration.mean, worth, state.rules.most_drafts)
    return replace(own, thresholds=tuple(found), thresholds_at=state.position, thresholds_price=worth)


# ------------------------------------------------------------------------------------------------------ shadows


def due(state: State) -> str | None:
    """The drafter whose shadow is worth most for its cost, where the account can pay it by now; None for none. A dear one is
    saved for: cheap ones do not spend what it needs."""
    if not state.drafters or state.position < state.rules.listening:
        return None
    rates = state.rates()
    best, chosen, worth = max([1.0, *rates.values()]), None, -1.0
    for name, drafter in state.drafters.items():
        cost, stale = state.costs.shadows.get(name), state.position - drafter.seen
        steps = drafter.rate.now.faded(state.position, state.rules.half_life).steps
        young = drafter.rate.usual.steps < 3
        if name == state.current or cost is None:
            continue
        if stale < (state.rules.window // 2 if young else state.rules.window):
            continue
        if rates[name] * (1 + 1.5 / (steps + 1) ** 0.5) < best and stale < state.rules.look_again:
            continue
        value = min(stale, 4000) / cost.value * (3 if young else 1)
        if value > worth:
            chosen, worth = name, value
    return chosen if chosen is not None and state.shadow_account >= state.costs.shadows[chosen].value else None


def shadow(state: State, name: str, confidences: Sequence[float], right: Sequence[bool], seconds: float = 0.0) -> State:
    """A drafter was graded on the latest committed tokens: how sure it is of what it would say at each place, and whether the
    text says the same; none where it could tell nothing. It decodes them virtually, with its own thresholds. seconds: that it
    took; 0 where nobody knows."""
    if not right:
        return replace(state, drafters={**state.drafters, name: replace(state.drafters[name], seen=state.position)})
    if seconds:
        costs = state.costs
        cost = costs.shadows[name].observe(seconds / costs.plain.value)
        state = replace(state, costs=replace(costs, shadows={**costs.shadows, name: cost}))
    calibration = state.drafters[name].calibration
    for confidence, one in zip(confidences, right, strict=True):
        calibration = calibration.observe(confidence, float(one))
    state = replace(state, drafters={**state.drafters, name: replace(state.drafters[name], calibration=calibration)})
    worth = max(1.0, state.rate(name))
    own, costs = _priced(state, name, worth), state.costs
    step, place, rate = costs.drafts[name].value, 0, own.rate
    while place < len(right):
        survival, drafts, accepted, good = 1.0, 0, 0, True
        while place + drafts < len(right) and drafts < len(own.thresholds) and survival >= own.thresholds[drafts]:
            survival *= calibration.predict(confidences[place + drafts])
            good = good and right[place + drafts]
            accepted += good
            drafts += 1
        scoring = costs.scoring_of(name)(drafts + 1)
        time = drafts * step + scoring + (costs.fixed if drafts else 0.0)
        rate = rate.add(state.position, accepted + 1, time, state.rules)
        place += accepted + 1
    after = {**state.drafters, name: replace(own, rate=rate, seen=state.position)}
    return replace(state, drafters=after, shadow_account=state.shadow_account - costs.shadows[name].value)
