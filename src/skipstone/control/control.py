"""Which drafter, how long a draft, or none: `decide` and `observe`, a fold over steps.

Every drafter is held against plain decoding by the text that is known by now: with its own stopping rule and the measured
costs, how many tokens would it have committed in how much time? That is its rate, in tokens a plain step (plain decoding's is
1). The drafter that drafts is graded by what it did; others by `shadow`, on what the verification left behind; lookups and
recycled tokens by `observe`, on the host. So nothing has to be tried to be known, as long as shadows are paid: they have an
account of their own, a share of the time, which is overdrawn by what a shadow took more than was thought at most.

Times are in plain steps. Positions count the committed tokens of a session, of a batch the mean of its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from skipstone.control import price
from skipstone.control.calibrate import PRIOR_WEIGHT
from skipstone.control.costs import Cost, Costs, Scoring
from skipstone.control.state import LOOKUP, NEVER_YET, PLAIN, PROBE, RECYCLE, Done, Drafter, Pace, Plan, Ranks, Rate, Rules, State

LEAST_SAVED = -2.0
"""Plain steps that shadows and trials may owe at most: what one of them took more than was thought."""
LEAST_PLAIN = 3
"""Plain steps that are timed before anything is drafted."""
STALL = 2.0
"""Times its expected time that a step may count as at most: more was the doing of something else."""
STALLS_APART = 200
"""Tokens between two such steps: of those that are nearer the second one counts in full."""
RETIMED_AFTER, RETIMED_SOON = 1000, 200
"""Tokens after which a cost is measured again, where nothing else did: what is thought too dear is not done otherwise. The
second one is for a belief that rests on FEW measurements."""
FEW = 2
"""Measurements that a first trial, or surprises in a row, leave a belief with."""
PACE_CHECKED = 16
"""Tokens after a change of the machine's pace was believed or denied, in which costs alone are learnt."""
AGREES = 1.12
"""Factor by which such a step has to differ from what was believed to say what the steps before it did."""
MOST_OWED = 2.0
"""Plain steps that these may owe to the account of probes."""
MOST_SAVED = 4.0
"""Plain steps that are saved for shadows at most."""
LOOKUPS_KEPT = 0.97
"""Of the rate of lookups, by a step that looks up."""
TRIED = 2
"""Drafts of a step that is taken to time a draft step; of a drafter that nothing is known of at least."""
TRIED_ON = (0.0,) * TRIED + (0.6,) * 6
"""Survivals until which a drafter drafts that nothing is known of: where it is sure, its first step may pay already."""
AT_ONCE = 16
"""Plain steps that are decided on at once where nothing pays: beside the shortest steps there are a decision takes long."""
AT_ONCE_WITH_MEANS = 4
"""The same where a drafter may draft again soon: as its shadow says so, which is asked for between decisions, or the ledger."""
YOUNG = 3
"""Steps, virtual ones of shadows included, up to which next to nothing is known of a drafter."""
LEAST_TRIAL = 0.2
"""Plain steps that a trial of a drafter with its own rule may lose at least, by what is thought before it."""
LOOKUP_TRIAL = 0.5
"""Plain steps that a lookup which is taken to time its scoring may lose, by what is thought before it."""
PROMISING, HOPE = 0.3, 1.5
"""Mean acceptance from which on a drafter is worth being timed, where it would be faster than the current one if it were always
right and so many times as fast as it is thought to be."""
BEST_CASE = 1.1
"""Tokens a plain step, of a drafter that is always right and takes what it is thought to, from which on it is worth a trial."""
COPIED = 8
"""Tokens that a lookup commits in a step from which on they are a copied passage: what drafters would have said of one tells
nothing of the text that is theirs to draft."""
CHOSEN_EVERY = 16
"""Tokens between two choices among the drafters: what decides between them does not move faster."""
WELL_KNOWN = 24
"""Measurements from which on a cost is known well."""
DRAFTING_AT_ONCE = 4
"""Steps of a drafter whose cost is known well that are decided on at once: only the first one is looked at closely, as a decision
is to take less time than it saves."""
LEAST_ROOM = 12.0
"""Plain steps that may still be lost, up to which a step that loses time is learnt from at once. Otherwise a few plans are waited
for: as many, and as bad ones as there are, hardly lose more."""
SCORED_OF = 4
"""Plans, about one of which teaches what scoring takes where that is known well."""
THRESHOLDS_KEPT, THRESHOLDS_OFF = 64, 0.05
"""Tokens after which thresholds are worked out anew, and the share that the price may have moved by until then."""
SAME_ROWS = 1.5
"""Times as many rows as another number up to which steps take about as long."""
FIRST_DRAFTS = 8
"""Drafts of a row, at most, while none were scored."""
NEW_TREE = 200
"""Tokens after which the tree of recycled tokens is made anew."""


# ------------------------------------------------------------------------------------------------------ deciding


def decide(state: State, matches: Sequence[int] = ()) -> Plan:
    """What the next step does. matches: of every row that decodes, tokens of the longest match of its end in what stands
    before, 0 for none; empty where nothing is looked up."""
    current = _current(state)
    unsure = current is not None and current in state.drafters and state.drafters[current].unsure
    worth = max(1.0, state.rate(current)) if current is not None and not unsure else 1.0
    if (plan := _without_choice(state, current, worth, matches)) is not None:
        return plan
    if any(matches) and (found := _lookup(state, matches, worth)) is not None:
        drafts, tokens = found
        return Plan(LOOKUP, worth, current, f"a match of {max(matches)}: {tokens:.1f} tokens expected", drafts=tuple(drafts))
    if current is None:
        steps = AT_ONCE if state.shadow_account < _cheapest(state) or not _any_young(state) else AT_ONCE_WITH_MEANS
        return Plan(PLAIN, worth, None, "nothing is faster than plain decoding", steps=steps)
    if unsure:
        reason = f"{current} is right too seldom here to be worth a draft"
        return Plan(PLAIN, worth, current, reason, steps=AT_ONCE_WITH_MEANS)
    reason = f"{current}: {worth:.2f} x plain decoding"
    if current == RECYCLE:
        assert state.ranks is not None
        return Plan(RECYCLE, worth, current, reason, tree=state.ranks.tree)
    own, steps = state.drafters[current], DRAFTING_AT_ONCE if _is_known_well(state, current) else 1
    return Plan(current, worth, current, reason, thresholds=own.thresholds, beside=own.beside, steps=steps)


def stands(state: State, plan: Plan, matches: Sequence[int]) -> bool:
    """Whether a plan for several steps goes on although there are matches now."""
    return not any(matches) or _lookup(state, matches, plan.price) is None


def is_urgent(state: State, done: Done) -> bool:
    """Whether what steps came to has to be learnt from before the next one: they lost time, and little more may be lost."""
    lost = done.seconds / state.costs.plain.value - (done.tokens if done.slowest is None else done.slowest)
    return lost > 0 and state.ledger.room < LEAST_ROOM


def _is_known_well(state: State, name: str) -> bool:
    """Of a drafter that is told how far to draft, whether it is known what it takes."""
    if state.drafters[name].own_rule:
        return False
    known = state.costs.drafts[name]
    return known.measurements >= WELL_KNOWN and not known.surprises


def _current(state: State) -> str | None:
    """The drafter that drafts, where nothing else does; None for none. It changes where another one is faster by a margin, and
    goes where it is slower than plain decoding by one, or unsure and not faster by one."""
    if state.current is not None and not _chooses(state):
        return state.current
    rates, margin = state.rates(), 1 + state.rules.margin
    best = max(rates, key=lambda name: rates[name], default=None)
    current = state.current if state.current in rates else None
    best_rate = max(rates[best], 1.0) if best is not None else 1.0
    if best_rate > (rates[current] if current is not None else 1.0) * margin:
        return best
    if current is None:
        return None
    unsure = current in state.drafters and state.drafters[current].unsure
    return None if rates[current] * (1 / margin if unsure else margin) < 1.0 else current


def _chooses(state: State) -> bool:
    """Whether the drafters are held against each other before this step."""
    treeless = state.current == RECYCLE and (state.ranks is None or state.ranks.tree is None)
    return treeless or not 0 <= state.position - state.chosen_at < CHOSEN_EVERY


def _without_choice(state: State, current: str | None, worth: float, matches: Sequence[int]) -> Plan | None:
    """A step that is plain for the ledger's sake, or is taken to measure something; None for neither."""
    if state.costs.plain.measurements < LEAST_PLAIN:
        return Plan(PLAIN, 1.0, current, "plain decoding is timed")
    if state.ledger.overdrawn:
        return Plan(PLAIN, worth, current, "more time was lost than may be: plain until it is won back", steps=AT_ONCE_WITH_MEANS)
    if (current is not None or matches) and _probe_is_due(state, worth):
        why = ", as all takes longer or less long than it did" if state.pace.changed else ""
        return Plan(PROBE, worth, current, f"a plain step is measured{why}")
    if (name := _untimed(state)) is not None:
        known = state.drafters[name].calibration.weight > PRIOR_WEIGHT
        reason = f"a draft step of {name} is timed" if known else f"{name} is tried"
        return Plan(name, worth, current, reason, thresholds=(0.0,) * TRIED if known else TRIED_ON, trial=True)
    trial = _lookup_trial(state, matches) or _trial_of_own_rule(state, current)
    return None if trial is None else replace(trial, price=worth, current=current)


def _trial_of_own_rule(state: State, current: str | None) -> Plan | None:
    """A step of a drafter that only its own steps tell of, as soon as what it may lose can be paid. What wins costs nothing, so
    that the next step is a trial, too, until it is known well enough to take over."""
    waiting = [name for name, one in state.drafters.items() if one.own_rule and name != current]
    if not waiting:
        return None
    name = min(waiting, key=lambda one: state.drafters[one].seen)
    loss = min(max(state.costs.wholes[name].value - 1, LEAST_TRIAL), MOST_SAVED)
    return Plan(name, 1.0, current, f"{name} is tried", trial=True) if state.shadow_account >= loss else None


def _untimed(state: State) -> str | None:
    """A drafter whose draft step is but guessed or was timed long ago, where a trial can be paid: one that is right often
    enough to be looked at, or else the one of which nothing is known that is fastest where it is always right."""
    unknown: dict[str, float] = {}
    current = max(1.0, state.rate(state.current)) if state.current is not None else 1.0
    for name, drafter in state.drafters.items():
        if drafter.own_rule:
            continue
        cost, calibration = state.costs.drafts[name], drafter.calibration
        old = (
            not cost.measurements
            or (cost.measurements == 1 and cost.surprises)
            or (name != state.current and _is_old(state, drafter.timed, cost.measurements))
        )
        if not old or state.shadow_account < min(cost(TRIED), 1.0):
            continue
        if calibration.weight > PRIOR_WEIGHT and calibration.mean >= PROMISING:
            if HOPE * _best_case(state, name) >= current:
                return name
        if not cost.measurements and calibration.weight <= PRIOR_WEIGHT:
            unknown[name] = _best_case(state, name)
    best = max(unknown, key=lambda one: unknown[one], default=None)
    return best if best is not None and unknown[best] >= BEST_CASE else None


def _is_old(state: State, timed: int, measurements: int) -> bool:
    """Whether a cost is to be measured again. timed: the position at which it was."""
    return state.position - timed > (RETIMED_AFTER if measurements > FEW else RETIMED_SOON)


def _best_case(state: State, name: str) -> float:
    """Tokens a plain step of a drafter that is always right."""
    costs, drafts = state.costs, len(TRIED_ON)
    return (drafts + 1) / (costs.drafts[name](drafts) + costs.scoring_of(name)(drafts + 1) + costs.fixed)


def _lookup_trial(state: State, matches: Sequence[int]) -> Plan | None:
    """A lookup that is taken to time its scoring, where that was long ago and a trial can be paid."""
    if not any(matches) or state.shadow_account < LOOKUP_TRIAL or not _is_old(state, state.scored, state.costs.scoring.line.measurements):
        return None
    drafts = tuple(TRIED if match else 0 for match in matches)
    return Plan(LOOKUP, 1.0, state.current, "the scoring of a lookup is timed", drafts=drafts, trial=True)


def _probe_is_due(state: State, worth: float) -> bool:
    tokens, loss = state.position - state.probed_at, 1 - 1 / worth
    if state.pace.changed and state.probe_account + MOST_OWED >= loss:
        return True
    return tokens > state.rules.plain_spacing and state.probe_account >= loss


def _lookup(state: State, matches: Sequence[int], worth: float) -> tuple[list[int], float] | None:
    """How much of every row's match to draft, and the tokens that a row is expected to commit, where that gains more than the
    current drafter does in the same time. A longer draft is worth its scoring at the rate of lookups: what is copied belongs to
    the text and is not there in the next step as well."""
    rows, costs = len(matches), state.costs
    length_price = max(worth, state.lookups.tokens / state.lookups.time)
    most = _furthest(costs.scoring)
    survival = [price.survivals(state.matches.predict(match)[:most]) if match else [] for match in matches]
    drafts = price.allocate(survival, length_price, costs.scoring if rows == 1 else lambda n: rows * costs.scoring(n / rows))
    tokens = 1 + sum(sum(chain[:kept]) for chain, kept in zip(survival, drafts, strict=True)) / rows
    time = costs.scoring(1 + sum(drafts) / rows) + costs.fixed + costs.lookup
    return (drafts, tokens) if tokens > worth * time else None


# ---------------------------------------------------------------------------------------------------- what is learnt


def resized(state: State, rows: int) -> State:
    """What is known where another number of rows decodes. Where that is about the same one, steps take about the same, and one
    plain step is timed; else all is known but what steps take."""
    costs, about_as_many = state.costs, max(rows, state.rows) < SAME_ROWS * min(rows, state.rows)
    drafters = {name: replace(one, thresholds=(), beside=()) for name, one in state.drafters.items()}
    if about_as_many:
        plain = replace(costs.plain, measurements=min(costs.plain.measurements, LEAST_PLAIN - 1))
        return replace(state, costs=replace(costs, plain=plain), drafters=drafters, rows=rows)
    fresh = replace(
        costs,
        plain=replace(costs.plain, measurements=0),
        scoring=costs.scoring.among(rows / state.rows),
        scorings={},
        drafts={name: cost.guess for name, cost in costs.drafts.items()},
        wholes={name: replace(cost, measurements=0) for name, cost in costs.wholes.items()},
    )
    return replace(state, spread=Rate(8.0, 8.0), costs=fresh, drafters={name: replace(one, timed=0) for name, one in drafters.items()}, rows=rows)


def begin(state: State) -> State:
    """A request begins: what was learnt of others counts half."""
    keep = state.rules.kept
    drafters = {name: replace(one, rate=one.rate.cut(keep)) for name, one in state.drafters.items()}
    ranks = None if state.ranks is None else replace(state.ranks, rate=state.ranks.rate.cut(keep))
    return replace(state, drafters=drafters, ranks=ranks, ledger=state.ledger.begin())


def observe(state: State, plan: Plan, done: Done) -> State:
    """The steps that were planned have been taken. Plain steps in which nothing else was done tell what a plain step takes, and
    lose nothing."""
    rules, now = state.rules, state.position + round(done.tokens)
    costs, surprised = _timed(state.costs, state, plan, done)
    plain, drafters, lookups, matches = costs.plain.value, dict(state.drafters), state.lookups, state.matches
    nearer, spread = done.tokens if done.slowest is None else done.slowest, state.spread
    time, stalled, pace = float(done.steps), False, state.pace
    if plan.kind in (PLAIN, PROBE) and done.rests and not costs.plain.surprises:
        pace = Pace(watched_from=now + PACE_CHECKED) if pace.changed else Pace()
    if plan.kind not in (PLAIN, PROBE) or not done.rests:
        time, expected, first = done.seconds / plain, _expected(state, plan, done), not state.ledger.request.plain
        stalled = time > STALL * expected
        if plan.kind != PLAIN and not plan.trial and not first and state.position >= pace.watched_from:
            pace = pace.add(min(time, STALL * expected), expected)
        if stalled and now - state.stalled_at > STALLS_APART:
            time = STALL * expected
        if first:  # it finds cold caches, as a plain one would
            time = min(time, max(expected, 1.0))
    if plan.kind in drafters:
        drafters[plan.kind] = _drafted(drafters[plan.kind], state.position, done, nearer, time, rules, surprised)
    elif plan.kind == PLAIN and plan.current in drafters and drafters[plan.current].unsure:
        waiting = drafters[plan.current]  # it would have decoded like that
        drafters[plan.current] = replace(waiting, rate=waiting.rate.add(state.position, nearer, time, rules))
    if plan.kind == LOOKUP:
        lookups = Rate(lookups.tokens * LOOKUPS_KEPT + nearer, lookups.time * LOOKUPS_KEPT + time)
    for one in done.matches:
        matches = matches.observe(one.match, one.right, one.looked_up)
    moved = now if plan.current != state.current else state.moved_at
    shadowing = rules.calm_shadowing if now - moved > rules.calm_after else rules.shadowing
    if done.slowest is not None and plan.kind not in (PLAIN, PROBE):
        spread = Rate(spread.tokens * LOOKUPS_KEPT + done.tokens, spread.time * LOOKUPS_KEPT + nearer)
    paid, probed = max(time - nearer / plan.price, 0.0) if plan.trial else 0.0, plan.kind == PROBE
    after = State(  # in full: `replace` takes three times as long
        costs=costs,
        drafters=drafters,
        rules=rules,
        ledger=state.ledger.add(time + done.shadow_seconds / plain, nearer),
        matches=matches,
        lookups=lookups,
        rows=state.rows,
        ranks=None if state.ranks is None else _recycled(state, costs, plan, done, time),
        current=plan.current,
        position=now,
        moved_at=moved,
        chosen_at=NEVER_YET if plan.trial else state.position if _chooses(state) else state.chosen_at,
        scored=now if plan.kind in (LOOKUP, RECYCLE) and not surprised else state.scored,
        probed_at=state.position if probed else state.probed_at,
        stalled_at=now if stalled else state.stalled_at,
        shadow_account=min(max(state.shadow_account - paid, LEAST_SAVED) + shadowing * time, MOST_SAVED),
        probe_account=min(state.probe_account + rules.plain_probing * time - (1 - 1 / plan.price if probed else 0.0), 1.0),
        pace=pace,
        spread=spread,
    )
    return _with_thresholds(after)


def _timed(costs: Costs, state: State, plan: Plan, done: Done) -> tuple[Costs, bool]:
    """What steps are believed to take after another one, and whether its time was a surprise."""
    if plan.kind in (PLAIN, PROBE):
        return _timed_plain(costs, state.pace, done) if done.rests else costs, False
    drafter = plan.kind if plan.kind in state.drafters else None
    plain = costs.plain.value
    if plan.trial and (drafter is None or not state.drafters[drafter].own_rule):
        costs = costs.anew(drafter)
    known = costs.scoring if drafter is None else costs.scoring_of(drafter)
    routine = known.line.measurements >= WELL_KNOWN and not known.surprised and state.position % SCORED_OF > 0
    if done.scoring is not None and done.verified and not routine:
        costs = costs.scored(drafter, done.verified + 1, done.scoring / plain)
    if drafter is None:
        return costs, costs.scoring.surprised
    if state.drafters[drafter].own_rule:
        return costs.stepped(drafter, done.seconds / plain), False
    if done.drafting is not None and done.passes:
        costs = costs.drafted(drafter, done.passes, done.drafting / plain)
    return costs, bool(costs.drafts[drafter].surprises) or costs.scoring_of(drafter).surprised


def _timed_plain(costs: Costs, pace: Pace, done: Done) -> Costs:
    """After plain steps. Where two in a row say what the steps before them did, that all takes longer, or less long, it is
    believed."""
    seconds = done.seconds / done.steps
    factor = seconds / costs.plain.value
    if not (pace.changed and _agrees(factor, pace)):
        return costs.timed(seconds, done.steps)
    if not costs.plain.surprises:
        return costs.paced(replace(costs.plain, surprises=1))
    most = pace.factor**2  # what steps before them took is in part believed by now
    return costs.paced(Cost(costs.plain.value * (min(factor, most) if factor > 1 else max(factor, most)), LEAST_PLAIN))


def _agrees(factor: float, pace: Pace) -> bool:
    """Whether a plain step says of the machine what other steps did. factor: by which it took longer than was thought."""
    return not 1 / AGREES < factor < AGREES and (factor > 1) is (pace.factor > 1)


def _expected(state: State, plan: Plan, done: Done) -> float:
    """What steps are thought to take, in plain steps."""
    costs, more = state.costs, done.steps - 1
    if plan.kind in (PLAIN, PROBE):
        return float(done.steps)
    if plan.kind in state.drafters and state.drafters[plan.kind].own_rule:
        return max(costs.wholes[plan.kind].value, 1.0)
    if plan.kind not in state.drafters:
        return max(costs.scoring(done.verified + 1) + costs.lookup, 1.0)
    drafting, scoring = costs.drafts[plan.kind], costs.scoring_of(plan.kind)
    time = max(drafting(done.passes or done.verified) + scoring(done.verified + 1), 1.0)
    if more:
        time += more * max(drafting(done.more_passes / more) + scoring(done.more_verified / more + 1), 1.0)
    return time


def _drafted(
    drafter: Drafter, position: int, done: Done, nearer: float, time: float, rules: Rules, surprised: bool
) -> Drafter:
    """A drafter after a step of its own. nearer: tokens by which the end came nearer. surprised: its time was a surprise, and it
    is timed once more: two are believed."""
    calibration, now = drafter.calibration.observe_all(done.confidences), position + round(done.tokens)
    rate, timed = drafter.rate.add(position, nearer, time, rules, done.steps), drafter.timed if surprised else now
    return replace(drafter, rate=rate, calibration=calibration, seen=now, timed=timed)


def _recycled(state: State, costs: Costs, plan: Plan, done: Done, time: float) -> Ranks:
    """Ranks after a step, and the tree where it is due. A step that drafted by it says itself what it came to. state: before
    the step. costs: after it."""
    assert state.ranks is not None
    rules, now = state.rules, state.position + round(done.tokens)
    # what is copied is not its to draft: it is held against drafters of all other text
    if plan.kind == LOOKUP and done.tokens >= COPIED:
        return state.ranks
    ranks = state.ranks.seen(done.ranks)
    if plan.kind == RECYCLE:
        return replace(ranks, rate=ranks.rate.add(now, done.tokens, time, rules), pending=())
    if now > rules.listening and now - ranks.tree_at > NEW_TREE:
        worth, chances = max(1.0, state.rate(RECYCLE)), [one / ranks.count for one in ranks.hits]
        most = min(rules.most_nodes, _furthest(costs.scoring))
        ranks = ranks.drawn(price.tree(chances, worth, costs.scoring, most=most, depth=rules.depth), now)
    return ranks.graded(now, costs, rules)


def _with_thresholds(state: State) -> State:
    """The current drafter's thresholds, anew where they are old or the price has moved."""
    name = state.current
    if name is None or name not in state.drafters or state.drafters[name].own_rule:
        return state
    own, worth = state.drafters[name], max(1.0, state.rate(name))
    if (
        own.thresholds
        and state.position - own.thresholds_at <= _kept(own)
        and abs(worth / own.thresholds_price - 1) <= THRESHOLDS_OFF
    ):
        return state
    return replace(state, drafters={**state.drafters, name: _priced(state, name, worth)})


def _kept(own: Drafter) -> float:
    """Tokens that a drafter's thresholds are kept for: few while it is learnt."""
    return min(THRESHOLDS_KEPT, own.rate.usual.steps)


def _priced(state: State, name: str, worth: float) -> Drafter:
    """With thresholds for a price. Whether to draft at all is held against a plain step alone: on a hard passage even a drafter
    that is far from its usual rate may be faster than that."""
    own, drafting, scoring = state.drafters[name], state.costs.drafts[name], state.costs.scoring_of(name)
    mean, most = own.calibration.mean, min(state.rules.most_drafts, _furthest(scoring))
    much = worth * state.spread.tokens / state.spread.time  # what a row gains beside the slowest one brings the end no nearer
    setup = state.costs.fixed + drafting.start
    found = price.thresholds(drafting.step, setup, scoring, mean, much, most)
    found[0] = min(found[0], price.thresholds(drafting.step, setup, scoring, mean, much / worth, min(most, price.AHEAD))[0])
    beside = price.thresholds(0.0, 0.0, scoring, mean, much, most) if state.rows > 1 else ()
    return replace(own, thresholds=tuple(found), beside=tuple(beside), thresholds_at=state.position, thresholds_price=worth)


def _furthest(scoring: Scoring) -> int:
    """Drafts of a row at most: twice as many as were scored, as further away nothing is known of what scoring takes."""
    return max(FIRST_DRAFTS, 2 * scoring.furthest)


# ------------------------------------------------------------------------------------------------------ shadows


def due(state: State, lag: Mapping[str, int] = MappingProxyType({})) -> str | None:
    """The drafter whose shadow is worth most for its cost, where the account can pay it by now; None for none. A dear one is
    saved for: cheap ones do not spend what it needs. lag: drafter -> tokens that it has to read, where they are more than a
    window."""
    shadows = state.costs.shadows
    if not shadows or state.position < state.rules.listening:
        return None
    if state.shadow_account < _cheapest(state):
        return None
    rates = state.rates()
    best, chosen, worth = max([1.0, *rates.values()]), None, -1.0
    for name, drafter in state.drafters.items():
        cost, stale = shadows.get(name), state.position - drafter.seen
        steps = drafter.rate.now.faded(state.position, state.rules.half_life).steps
        young = drafter.rate.usual.steps < YOUNG
        if cost is None or (name == state.current and not drafter.unsure):
            continue
        if stale < (state.rules.window // 2 if young else state.rules.window):
            continue
        if rates[name] * (1 + 1.5 / (steps + 1) ** 0.5) < best and stale < state.rules.look_again:
            continue
        value = min(stale, 4000) / (cost.value * _windows(state, lag.get(name, 0))) * (3 if young else 1)
        if value > worth:
            chosen, worth = name, value
    if chosen is None:
        return None
    needed = shadows[chosen].value * _windows(state, lag.get(chosen, 0))
    return chosen if state.shadow_account >= min(needed, MOST_SAVED) else None


def _any_young(state: State) -> bool:
    return any(one.rate.usual.steps < YOUNG and not one.own_rule for one in state.drafters.values())


def _cheapest(state: State) -> float:
    """What has to be saved before any shadow can be paid."""
    return min([MOST_SAVED, *(cost.value for cost in state.costs.shadows.values())])


def _windows(state: State, tokens: int) -> float:
    """How many windows so many tokens are, one at least."""
    return max(tokens / state.rules.window, 1.0)


def shadow(
    state: State, name: str, confidences: Sequence[float], right: Sequence[bool], seconds: float = 0.0, read: int = 0
) -> State:
    """A drafter was graded on the latest committed tokens: how sure it is of what it would say at each place, and whether the
    text says the same; none where that tells nothing of what it drafts now. It decodes them virtually, with its own
    thresholds. seconds: that it took; 0 where nobody knows. read: tokens that it had to read."""
    paid = state.costs.shadows[name].value * _windows(state, read) if right else 0.0
    if seconds:
        costs = state.costs
        paid = seconds / costs.plain.value
        cost = costs.shadows[name].observe(paid / _windows(state, read))
        state = replace(state, costs=replace(costs, shadows={**costs.shadows, name: cost}))
    if not right:
        seen = {**state.drafters, name: replace(state.drafters[name], seen=state.position)}
        return replace(state, drafters=seen, shadow_account=max(state.shadow_account - paid, LEAST_SAVED))
    calibration = state.drafters[name].calibration.observe_all(zip(confidences, right, strict=True))
    state = replace(state, drafters={**state.drafters, name: replace(state.drafters[name], calibration=calibration)})
    worth = max(1.0, state.rate(name))
    own, costs = _priced(state, name, worth), state.costs
    place, rate = 0, own.rate
    while place < len(right):
        survival, drafts, accepted, good = 1.0, 0, 0, True
        while place + drafts < len(right) and drafts < len(own.thresholds) and survival >= own.thresholds[drafts]:
            survival *= calibration.predict(confidences[place + drafts])
            good = good and right[place + drafts]
            accepted += good
            drafts += 1
        scoring = costs.scoring_of(name)(drafts + 1)
        time = costs.drafts[name](drafts) + scoring + (costs.fixed if drafts else 0.0)
        rate = rate.add(state.position, accepted + 1, time, state.rules)
        place += accepted + 1
    after = {**state.drafters, name: replace(own, rate=rate, seen=state.position)}
    account = max(state.shadow_account - paid, LEAST_SAVED)
    return replace(state, drafters=after, shadow_account=account, chosen_at=NEVER_YET)
