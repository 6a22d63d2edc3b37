"""What is learnt of steps and shadows: `observe` and `shadow`, a fold over what was done.

The drafter that drafts is graded by what it did; others by `shadow`, on what the verification left behind; lookups and recycled
tokens by `observe`, on the host. So nothing has to be tried to be known, as long as shadows are paid: they have an account of
their own, a share of the time, which is overdrawn by what a shadow took more than was thought at most.

Times are in plain steps. Positions count the committed tokens of a session, of a batch the mean of its rows.
"""

from collections.abc import Sequence
from dataclasses import replace

from skipstone.control import price
from skipstone.control.costs import BELIEVED_AFTER, LEAST_PLAIN, Cost, Costs
from skipstone.control.ledger import Ledger
from skipstone.control.state import (
    EVEN,
    LOOKUP,
    MOST_SAVED,
    NEVER_YET,
    PLAIN,
    PROBE,
    PROBE_STEPS,
    RECYCLE,
    Done,
    Drafter,
    Pace,
    Plan,
    Ranks,
    Rate,
    Rules,
    State,
    Steady,
)

LEAST_SAVED = -2.0
"""Plain steps that shadows and trials may owe at most: what one of them took more than was thought."""
MOST_PROBING = float(PROBE_STEPS)
"""Plain steps that are saved for probes at most."""
STALL = 2.0
"""Times its expected time that a step may count as at most: more was the doing of something else."""
STALLS_APART = 200
"""Tokens between two such steps: of those that are nearer the second one counts in full."""
PACE_CHECKED = 16
"""Tokens after a change of the machine's pace was believed or denied, in which costs alone are learnt."""
AGREES = 1.12
"""Factor from which on a plain step differs from what was believed, and says of the pace what the steps before it did."""
KEPT_A_STEP = 0.97
"""Share that a step leaves of the rate of lookups, where it is one, and of a batch's spread, where it drafts."""
COPIED = 8
"""Tokens that a lookup commits in a step from which on they are a copied passage: what drafters would have said of one tells
nothing of the text that is theirs to draft."""
LEAST_ROOM = 12.0
"""Plain steps that may still be lost, up to which a step that loses time is learnt from at once. Otherwise a few plans are
waited for: as many, and as bad ones as there are, hardly lose more."""
MOST_COLD = 1.5
"""Plain steps that one behind a draft, or one in which something was looked up, counts as at most: what takes more was the
doing of something else."""
TIMED_OF = 4
"""Plans, about one of which teaches what drafting and scoring take where that is known well."""
THRESHOLDS_KEPT = 64
"""Tokens after which thresholds are worked out anew."""
SAME_ROWS = 1.5
"""Times as many rows as another number up to which steps take about as long."""
NEW_TREE = 200
"""Tokens after which the tree of recycled tokens is made anew."""


def begin(state: State) -> State:
    """A request begins: what was learnt of others counts half."""
    keep = state.rules.kept
    drafters = {name: replace(one, rate=one.rate.cut(keep)) for name, one in state.drafters.items()}
    ranks = None if state.ranks is None else replace(state.ranks, rate=state.ranks.rate.cut(keep))
    known = state.steady
    steady = None if known is None else Steady(known.costs, known.ledger.begin(), known.position)
    return replace(state, drafters=drafters, ranks=ranks, ledger=state.ledger.begin(), steady=steady)


def resized(state: State, rows: int) -> State:
    """What is known where another number of rows decodes. Where that is about the same one, steps take about the same, and one
    plain step is timed; else all is known but what steps take."""
    costs, about_as_many = state.costs, max(rows, state.rows) < SAME_ROWS * min(rows, state.rows)
    drafters = {name: replace(one, least=(), beside=()) for name, one in state.drafters.items()}
    if about_as_many:
        plain = replace(costs.plain, measurements=min(costs.plain.measurements, LEAST_PLAIN - 1))
        known = replace(costs, plain=plain)
        return replace(state, costs=known, drafters=drafters, rows=rows, pace=Pace(), steady=None)
    fresh = replace(
        costs,
        plain=replace(costs.plain, measurements=0),
        scoring=costs.scoring.among(rows / state.rows),
        scorings={},
        drafts={name: cost.guess for name, cost in costs.drafts.items()},
        wholes={name: replace(cost, measurements=0) for name, cost in costs.wholes.items()},
    )
    drafters = {name: replace(one, timed=0) for name, one in drafters.items()}
    return replace(state, spread=EVEN, costs=fresh, drafters=drafters, rows=rows, pace=Pace(), steady=None)


def observe(state: State, plan: Plan, done: Done) -> State:
    """The steps that were planned have been taken. Plain steps in which nothing else was done tell what a plain step takes, and
    lose nothing but what the first ones behind a draft take more."""
    rules, now = state.rules, state.position + round(done.tokens)
    costs, surprised, ledger = _timed(state, plan, done)
    plain, drafters, lookups, matches = costs.plain.value, dict(state.drafters), state.lookups, state.matches
    time, stalled, pace = _counted(state, costs.plain, plan, done)
    ledger = ledger.add(time + done.aside_seconds / plain, done.nearer)
    if plan.kind in drafters:
        drafters[plan.kind] = _drafted(drafters[plan.kind], state.position, done, time, rules, surprised)
    elif plan.kind == PLAIN and plan.current in drafters and drafters[plan.current].unsure:
        waiting = drafters[plan.current]  # it would have decoded like that
        drafters[plan.current] = replace(waiting, rate=waiting.rate.add(state.position, done.nearer, time, rules, done.steps))
    if plan.kind == LOOKUP:
        lookups = lookups.cut(KEPT_A_STEP).add(done.nearer, time)
    for one in done.matches:
        matches = matches.observe(one.match, one.right, one.looked_up)
    moved = now if plan.current != state.current else state.moved_at
    shadowing = rules.calm_shadowing if now - moved > rules.calm_after else rules.shadowing
    shadowing += rules.early_shadowing / (1 + state.position / rules.early)
    lost, probed = time - done.nearer / plan.price, plan.kind == PROBE
    paid = (lost if plan.current is None else max(lost, 0.0)) if plan.trial else 0.0
    probing = done.steps * (1 - 1 / plan.price) if probed else 0.0
    measured = probed and (done.warm is None or done.warm[0] > 0)
    after = State(  # in full: `replace` takes three times as long
        costs=costs,
        drafters=drafters,
        rules=rules,
        ledger=ledger,
        matches=matches,
        lookups=lookups,
        rows=state.rows,
        ranks=None if state.ranks is None else _recycled(state, costs, plan, done, time),
        current=plan.current,
        position=now,
        moved_at=moved,
        chosen_at=NEVER_YET if plan.trial else state.position if state.chooses else state.chosen_at,
        scored=now if plan.kind in (LOOKUP, RECYCLE) and not surprised else state.scored,
        probed_at=state.position if measured else state.probed_at,
        stalled_at=now if stalled else state.stalled_at,
        shadow_account=min(max(state.shadow_account - paid, LEAST_SAVED) + shadowing * time, MOST_SAVED),
        probe_account=min(state.probe_account + rules.plain_probing * time - probing, MOST_PROBING),
        pace=pace,
        steady=Steady(costs, ledger, now) if pace.steady else state.steady,
        spread=_spread(state.spread, plan, done),
    )
    return _with_thresholds(after)


def _counted(state: State, plain: Cost, plan: Plan, done: Done) -> tuple[float, bool, Pace]:
    """The time of steps that counts, in plain steps, whether it was a stall, and the pace after them. plain: what a plain step
    takes, by what is known then."""
    pace, now = state.pace, state.position + round(done.tokens)
    if plan.kind in (PLAIN, PROBE):
        if not plain.surprises and (done.warm is None or done.warm[0]):
            pace = Pace(watched_from=now + PACE_CHECKED) if pace.changed else Pace()
        return _plain_time(plain, done), False, pace
    time, expected, first = done.seconds / plain.value, _expected(state, plan, done), not state.ledger.request.plain
    if done.preparing:
        return min(time, expected), False, pace
    most = STALL * expected
    stalled = time > most
    if plan.kind != PLAIN and not plan.trial and not first and state.position >= pace.watched_from:
        pace = pace.add(min(time, most), expected)
    if stalled and now - state.stalled_at > STALLS_APART:
        time = most
    if first:  # it finds cold caches, as a plain one would
        time = min(time, max(expected, 1.0))
    return time, stalled, pace


def _plain_time(plain: Cost, done: Done) -> float:
    """What plain steps count as: one each, but for those that find caches which a draft has filled, or that were busy."""
    busy, busy_seconds = done.busy
    taken = min(max(busy_seconds / plain.value, float(busy)), MOST_COLD * busy)
    return taken + _quiet_time(plain, done.steps - busy, done.seconds - busy_seconds, done)


def _quiet_time(plain: Cost, steps: int, seconds: float, done: Done) -> float:
    """The same of those that were not busy. steps, seconds: of these."""
    if done.behind_prompt:
        return float(steps)
    warm, each = done.warm or (steps, 0.0)
    cold = steps - warm
    return warm + min(max((seconds - warm * each) / plain.value, float(cold)), MOST_COLD * cold) if cold else float(warm)


def _spread(spread: Rate, plan: Plan, done: Done) -> Rate:
    if done.slowest is None or plan.kind in (PLAIN, PROBE):
        return spread
    return spread.cut(KEPT_A_STEP).add(done.tokens, done.nearer)


def is_urgent(state: State, done: Done) -> bool:
    """Whether what steps came to has to be learnt from before the next one: they lost time, and little more may be lost."""
    return done.seconds > done.nearer * state.costs.plain.value and state.ledger.room < LEAST_ROOM


def _timed(state: State, plan: Plan, done: Done) -> tuple[Costs, bool, Ledger]:
    """What steps are believed to take after another one, whether its time was a surprise, and the ledger before it."""
    if plan.kind not in (PLAIN, PROBE):
        return *_timed_draft(state.costs, state, plan, done), state.ledger
    if done.busy[0] == done.steps:
        return state.costs, False, state.ledger
    costs, ledger = _timed_plain(state, done)
    return costs, False, ledger


def _timed_draft(costs: Costs, state: State, plan: Plan, done: Done) -> tuple[Costs, bool]:
    """The first two of these after a step that drafted."""
    if done.preparing:
        return costs, True  # it is timed once more
    drafter = plan.kind if plan.kind in state.drafters else None
    plain = costs.plain.value
    costs = costs.learnt(done.learning_seconds / plain / done.steps)
    if plan.trial and (drafter is None or not state.drafters[drafter].own_rule):
        costs = costs.anew(drafter)
    known = costs.scoring if drafter is None else costs.scoring_of(drafter)
    routine = known.line.well_known and state.position % TIMED_OF > 0
    if done.scoring is not None and done.verified and not routine:
        costs = costs.scored(drafter, done.verified + 1, done.scoring / plain)
    if drafter is None:
        return costs, costs.scoring.surprised
    if state.drafters[drafter].own_rule:
        return costs.stepped(drafter, done.seconds / plain), False
    routine = costs.drafts[drafter].well_known and state.position % TIMED_OF > 0
    if done.drafting is not None and done.passes and not routine:
        costs = costs.drafted(drafter, done.passes, done.drafting / plain)
    return costs, bool(costs.drafts[drafter].surprises) or costs.scoring_of(drafter).surprised


def _timed_plain(state: State, done: Done) -> tuple[Costs, Ledger]:
    """After plain steps. Where two say what the steps before them did, that all takes longer, or less long, it is believed.
    What these seemed to say of drafters is then forgotten, and what they seemed to lose is counted at the new pace."""
    costs, ledger, pace, steady = state.costs, state.ledger, state.pace, state.steady
    steps, seconds = done.warm or (done.steps, done.seconds / done.steps)
    if not steps:  # before anything is known of a number of rows, cold ones tell as well
        unknown = costs.plain.measurements < LEAST_PLAIN
        return costs.timed(done.seconds / done.steps, done.steps) if unknown else costs, ledger
    factor, median = seconds / costs.plain.value, seconds if done.warm_median is None else done.warm_median
    if not (pace.changed and _agrees(median / costs.plain.value, pace)):
        return costs.timed(seconds, steps), ledger
    if steps + costs.plain.surprises < BELIEVED_AFTER:
        return costs.paced(replace(costs.plain, surprises=1)), ledger
    most = pace.factor**2  # what steps before them took is in part believed by now
    believed = min(factor, most) if factor > 1 else max(factor, most)
    plain = Cost(costs.plain.value * believed, LEAST_PLAIN)
    if steady is None:
        return costs.paced(plain), ledger
    return steady.costs.paced(plain), ledger.repriced(steady.ledger, state.position - steady.position, believed)


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


def _drafted(drafter: Drafter, position: int, done: Done, time: float, rules: Rules, surprised: bool) -> Drafter:
    """A drafter after a step of its own. surprised: its time was a surprise, and it is timed once more."""
    calibration, now = drafter.calibration.observe_all(done.confidences), position + round(done.tokens)
    rate, timed = drafter.rate.add(position, done.nearer, time, rules, done.steps), drafter.timed if surprised else now
    return Drafter(
        rate, calibration, now, timed, drafter.least, drafter.least_at, drafter.beside, drafter.own_rule, drafter.searches
    )


def _recycled(state: State, costs: Costs, plan: Plan, done: Done, time: float) -> Ranks:
    """Ranks after a step, and the tree where it is due. A step that drafted by it says itself what it came to. state: before
    the step. costs: after it."""
    assert state.ranks is not None
    rules, now = state.rules, state.position + round(done.tokens)
    # what is copied is not its to draft: it is held against drafters of all other text
    if (plan.kind == LOOKUP and done.tokens >= COPIED) or (plan.kind != RECYCLE and not done.ranks):
        return state.ranks
    ranks = state.ranks.seen(done.ranks)
    if plan.kind == RECYCLE:
        return replace(ranks, rate=ranks.rate.add(now, done.tokens, time, rules), pending=())
    if now > rules.listening and now - ranks.tree_at > NEW_TREE:
        worth, chances = max(1.0, state.rate(RECYCLE)), [one / ranks.count for one in ranks.hits]
        most = min(rules.most_nodes, costs.scoring.reach)
        ranks = ranks.drawn(price.tree(chances, worth, costs.scoring, most=most, depth=rules.depth), now)
    return ranks.graded(now, costs, rules)


def _with_thresholds(state: State) -> State:
    """The current drafter's thresholds, anew where they are old."""
    name = state.current
    if name is None or name not in state.drafters or state.drafters[name].own_rule:
        return state
    own = state.drafters[name]
    if own.least and state.position - own.least_at <= _kept(own):
        return state
    return replace(state, drafters={**state.drafters, name: _priced(state, name)})


def _kept(own: Drafter) -> float:
    """Tokens that a drafter's thresholds are kept for: few while it is learnt."""
    return min(THRESHOLDS_KEPT, own.rate.usual.steps)


def _priced(state: State, name: str) -> Drafter:
    """With new thresholds."""
    own, drafting, scoring = state.drafters[name], state.costs.drafts[name], state.costs.scoring_of(name)
    mean, most = own.calibration.mean, min(state.rules.most_drafts, scoring.reach)
    spread = state.spread.tokens / state.spread.time  # what a row gains beside the slowest one brings the end no nearer
    least = price.thresholds(drafting.step, state.costs.fixed + drafting.start, scoring, mean, spread, most)
    beside = price.thresholds(0.0, 0.0, scoring, mean, spread, most) if state.rows > 1 else ()
    return replace(own, least=tuple(least), beside=tuple(beside), least_at=state.position)


def shadow(
    state: State, name: str, confidences: Sequence[float], right: Sequence[bool], seconds: float = 0.0, read: int = 0
) -> State:
    """A drafter was graded on the latest committed tokens: how sure it is of what it would say at each place, and whether the
    text says the same; none where that tells nothing of what it drafts now. It decodes them virtually, with its own
    thresholds. seconds: that it took; 0 where nobody knows. read: tokens that it had to read."""
    paid = state.costs.shadows[name].value * state.windows(read) if right else 0.0
    if seconds:
        costs = state.costs
        paid = seconds / costs.plain.value
        cost = costs.shadows[name].observe(paid / state.windows(read))
        state = replace(state, costs=replace(costs, shadows={**costs.shadows, name: cost}))
    if not right:
        seen = {**state.drafters, name: replace(state.drafters[name], seen=state.position)}
        return replace(state, drafters=seen, shadow_account=max(state.shadow_account - paid, LEAST_SAVED))
    calibration = state.drafters[name].calibration.observe_all(zip(confidences, right, strict=True))
    state = replace(state, drafters={**state.drafters, name: replace(state.drafters[name], calibration=calibration)})
    worth = max(1.0, state.rate(name))
    own, costs = _priced(state, name), state.costs
    thresholds, place, rate = own.thresholds(worth), 0, own.rate
    while place < len(right):
        survival, drafts, accepted, good = 1.0, 0, 0, True
        while place + drafts < len(right) and drafts < len(thresholds) and survival >= thresholds[drafts]:
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
