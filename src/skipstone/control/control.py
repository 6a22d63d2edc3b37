"""Which drafter, how long a draft, or none, and whose shadow: `decide` and `due`, pure functions of what is known.

Every drafter is held against plain decoding by the text that is known by now: with its own stopping rule and the measured
costs, how many tokens would it have committed in how much time? That is its rate, in tokens a plain step (plain decoding's is
1). What decisions come to is learnt by `learning`.

Times are in plain steps. Positions count the committed tokens of a session, of a batch the mean of its rows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from skipstone.control import price
from skipstone.control.calibrate import PRIOR_WEIGHT
from skipstone.control.costs import LEAST_PLAIN
from skipstone.control.state import LOOKUP, MOST_SAVED, PLAIN, PROBE, PROBE_STEPS, RECYCLE, TRIAL_STEPS, YOUNG, Plan, State

RETIMED_AFTER, RETIMED_SOON = 1000, 200
"""Tokens after which a cost is measured again, where nothing else did: what is thought too dear is not done otherwise. The
second one is for a belief that rests on FEW measurements."""
FEW = 2
"""Measurements that a first trial, or surprises in a row, leave a belief with."""
MOST_OWED = 8.0
"""Plain steps that probes may owe to their account, where the machine's pace has changed."""
TRIED = 2
"""Drafts of a trial at least."""
TRIED_ON = (0.0,) * TRIED + (0.6,) * 6
"""Survivals until which a drafter drafts in a trial: where it is sure, the step may pay."""
AT_ONCE = 128
"""Plain steps that are decided on at once at most, where nothing pays."""
AT_ONCE_WITH_MEANS = 4
"""The same at least, where a drafter may draft again soon: as its shadow says so, which is asked for between decisions, or the
ledger."""
MOST_WON_BACK = 32
"""The same at most, where a drafter waits for more to be won back."""
LEARNING_SHARE = 0.01
"""Share of the time that learning may take where steps are plain, by what it takes behind a step that drafts: beside the
shortest ones there are it takes long."""
LEAST_TRIAL = 0.2
"""Plain steps that a trial of a drafter with its own rule may lose at least, by what is thought before it."""
LOOKUP_TRIAL = 0.5
"""Plain steps that a lookup which is taken to time its scoring may lose, by what is thought before it."""
PROMISING, HOPE = 0.3, 1.5
"""Mean acceptance from which on a drafter is worth being timed, where it would be faster than the current one if it were always
right and so many times as fast as it is thought to be."""
DEAR = 1.5
"""Plain steps from which on a shadow is dear: a drafter that has such a one drafts to be known."""
LEAST_LOOK = 0.5
"""Plain steps that are saved before it does."""
LOOK_STEPS, MOST_LOOK_STEPS = 2, 8
"""Steps of such a look at least, as the first one finds other weights in the caches, and at most."""
LEAST_LOSS = 0.05
"""Share of its time that a look is thought to lose at least."""
LOGISTIC, MOST_EXPONENT = 1.7, 30.0
"""Scale at which a logistic function is about a normal distribution's, and the exponent beyond which a chance is none."""
DEVIATION = 0.7
"""Standard deviation of what one step of a drafter says of its rate, in tokens a plain step."""
BEST_CASE = 1.0
"""Tokens a plain step, of a drafter that is always right and takes what it is thought to, from which on it is worth a trial."""
MOST_AT_STAKE = 12.0
"""Plain steps that may still be lost, from which on no draft is cut: hardly any could lose as many."""
DRAFTING_AT_ONCE = 6
"""Steps of a drafter whose cost is known well that are decided on at once: only the first one is looked at closely, as a
decision is to take less time than it saves."""


def decide(state: State, matches: Sequence[int] = ()) -> Plan:
    """What the next step does. matches: of every row that decodes, tokens of the longest match of its end in what stands
    before, 0 for none; empty where nothing is looked up."""
    plan = _wanted(state, matches)
    if state.ledger.room >= MOST_AT_STAKE:
        return plan
    affordable = _affordable(state, plan)
    if affordable is None:
        affordable = _affordable(state, _wanted(state, matches, trials=False))
        assert affordable is not None
    return affordable


def _wanted(state: State, matches: Sequence[int], trials: bool = True) -> Plan:
    """What the next step would do, whatever it may lose. trials: whether it may measure something by drafting."""
    current = _current(state)
    unsure = current is not None and current in state.drafters and state.drafters[current].unsure
    worth = max(1.0, state.rate(current)) if current is not None and not unsure else 1.0
    if (plan := _without_choice(state, current, worth, matches)) is not None:
        return plan
    if trials and (plan := _trial(state, current, worth, matches)) is not None:
        return plan
    if any(matches) and (found := _lookup(state, matches, worth)) is not None:
        drafts, tokens = found
        return Plan(LOOKUP, worth, current, f"a match of {max(matches)}: {tokens:.1f} tokens expected", drafts=tuple(drafts))
    if current is None:
        return Plan(PLAIN, worth, None, "nothing is faster than plain decoding", steps=_plain_steps(state))
    if unsure:
        reason = f"{current} is right too seldom here to be worth a draft"
        return Plan(PLAIN, worth, current, reason, steps=_fewest_plain_steps(state))
    reason = f"{current}: {worth:.2f} x plain decoding"
    if current == RECYCLE:
        assert state.ranks is not None
        return Plan(RECYCLE, worth, current, reason, tree=state.ranks.tree)
    own, steps = state.drafters[current], DRAFTING_AT_ONCE if _is_known_well(state, current) else 1
    beside = tuple([one * worth for one in own.beside])
    return Plan(current, worth, current, reason, thresholds=own.thresholds(worth), beside=beside, steps=steps)


def _affordable(state: State, plan: Plan) -> Plan | None:
    """A plan, its drafts no more than what may still be lost pays for where none of them is right; a plain one where that pays
    for none. None for a trial that had to be shorter than one that tells something."""
    room, costs, name = state.ledger.room, state.costs, plan.kind
    if plan.kind in (PLAIN, PROBE) or (name in state.drafters and state.drafters[name].own_rule):
        return plan
    if plan.kind == RECYCLE:
        assert plan.tree is not None
        stake = costs.scoring(len(plan.tree.ranks) + 1) + costs.fixed - 1
        return plan if stake <= room else _won_back(state, stake, plan.price, plan.current)
    if plan.kind == LOOKUP:
        drafts = list(plan.drafts)
        stake = math.inf
        while any(drafts):
            stake = costs.scoring(1 + sum(drafts) / len(drafts)) + costs.fixed + costs.lookup - 1
            if stake <= room:
                return replace(plan, drafts=tuple(drafts))
            if plan.trial:
                return None
            drafts[drafts.index(max(drafts))] -= 1
        return _won_back(state, stake, plan.price, plan.current)
    kept = _payable(state, name, len(plan.thresholds), room)
    if plan.trial and kept < TRIED:
        return None
    if kept or not plan.thresholds:
        return _cut(plan, kept)
    return _won_back(state, _stake(state, name, 1), plan.price, plan.current)


def _stake(state: State, name: str, drafts: int) -> float:
    """What so many drafts of a drafter lose where none of them is right."""
    costs = state.costs
    return costs.drafts[name](drafts) + costs.scoring_of(name)(drafts + 1) + costs.fixed - 1


def _payable(state: State, name: str, most: int, room: float) -> int:
    """How many drafts of a drafter, at most so many, lose no more than there is room for."""
    while most and _stake(state, name, most) > room:
        most -= 1
    return most


def _cut(plan: Plan, drafts: int) -> Plan:
    """With so many drafts at most."""
    if drafts == len(plan.thresholds):
        return plan
    return replace(plan, thresholds=plan.thresholds[:drafts], beside=plan.beside[:drafts])


def further(state: State, plan: Plan, steps: int, lost: float, paid: float) -> Plan | None:
    """A trial that has steps left, its drafts no more than what may still be lost pays for; None where it is over, as that pays
    for too few, or what was saved for it is spent. steps: that it has taken. lost: by these, against plain decoding. paid: the
    same against what decodes now."""
    if steps >= LOOK_STEPS and paid > state.shadow_account:
        return None
    kept = _payable(state, plan.kind, len(plan.thresholds), state.ledger.room - lost)
    return None if kept < TRIED else _cut(plan, kept)


def _won_back(state: State, stake: float, worth: float, current: str | None) -> Plan:
    """Plain steps until so much may be lost again."""
    most = AT_ONCE if current is None else MOST_WON_BACK
    steps = round(min(max(state.ledger.steps_until(stake), _fewest_plain_steps(state)), most))
    return Plan(PLAIN, worth, current, "more time was lost than may be: plain until it is won back", steps=steps)


def _fewest_plain_steps(state: State) -> int:
    """Plain steps beside which learning takes no more than it may."""
    return max(AT_ONCE_WITH_MEANS, min(math.ceil(state.costs.fixed / LEARNING_SHARE), MOST_WON_BACK))


def _plain_steps(state: State) -> int:
    """That are decided on at once where nothing pays: fewer where a shadow can be cast behind them, which says what does."""
    rules, shadows = state.rules, state.costs.shadows
    if state.position < rules.early and state.any_young and state.shadow_account >= state.cheapest_shadow:
        return _fewest_plain_steps(state)
    cheap = [cost.value for name, cost in shadows.items() if cost.value < DEAR or state.drafters[name].searches]
    if cheap and (state.shadow_account >= min(cheap) or state.ledger.request.plain < rules.window):
        return rules.window
    return AT_ONCE


def stands(state: State, plan: Plan, matches: Sequence[int]) -> bool:
    """Whether a plan for several steps goes on although there are matches now."""
    return not any(matches) or _lookup(state, matches, plan.price) is None


def _is_known_well(state: State, name: str) -> bool:
    """Of a drafter that is told how far to draft, whether it is known what it takes."""
    if state.drafters[name].own_rule:
        return False
    return state.costs.drafts[name].well_known


def _current(state: State) -> str | None:
    """The drafter that drafts, where nothing else does; None for none. It changes where another one is faster by a margin, and
    goes where it is slower than plain decoding by one, or unsure and not faster by one."""
    if state.current is not None and not state.chooses:
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


def _without_choice(state: State, current: str | None, worth: float, matches: Sequence[int]) -> Plan | None:
    """A step that is plain for the ledger's sake, or to measure what one takes; None for neither."""
    if state.costs.plain.measurements < LEAST_PLAIN:
        return Plan(PLAIN, 1.0, current, "plain decoding is timed")
    if state.ledger.overdrawn:
        return _won_back(state, 0.0, worth, current)
    if (current is not None or matches) and _probe_is_due(state, worth):
        copies = any(matches) and _lookup(state, matches, worth) is not None
        lost = max(worth, state.lookups.tokens / state.lookups.time) if copies else worth
        if _probe_is_due(state, lost):
            why = ", as all takes longer or less long than it did" if state.pace.changed else ""
            return Plan(PROBE, lost, current, f"a plain step is measured{why}", steps=PROBE_STEPS)
    return None


def _trial(state: State, current: str | None, worth: float, matches: Sequence[int]) -> Plan | None:
    """A step that drafts to measure something; None where nothing is to be measured, or what was saved does not pay for it."""
    if (name := _untimed(state)) is not None:
        known = state.drafters[name].calibration.weight > PRIOR_WEIGHT
        reason = f"a draft step of {name} is timed" if known else f"{name} is tried"
        return Plan(name, worth, current, reason, thresholds=TRIED_ON, trial=True, steps=TRIAL_STEPS if known else 1)
    if (look := _look_by_drafting(state, current, worth)) is not None:
        return look
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
        cost = state.costs.drafts[name]
        measured = cost.measurements > 1 or (cost.measurements == 1 and not cost.surprises)
        if measured and (name == state.current or not _is_old(state, drafter.timed, cost.measurements)):
            continue
        if state.shadow_account < min(cost(TRIED), 1.0):
            continue
        calibration = drafter.calibration
        promising = calibration.weight > PRIOR_WEIGHT and calibration.mean >= PROMISING
        if promising and HOPE * _best_case(state, name) >= current:
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
    if (
        not any(matches)
        or state.shadow_account < LOOKUP_TRIAL
        or not _is_old(state, state.scored, state.costs.scoring.line.measurements)
    ):
        return None
    drafts = tuple(TRIED if match else 0 for match in matches)
    return Plan(LOOKUP, 1.0, state.current, "the scoring of a lookup is timed", drafts=drafts, trial=True)


def _probe_is_due(state: State, worth: float) -> bool:
    loss = PROBE_STEPS * (1 - 1 / worth)
    if state.pace.changed and state.probe_account + MOST_OWED >= loss:
        return True
    return state.position - state.probed_at > state.rules.plain_spacing and state.probe_account >= loss


def _lookup(state: State, matches: Sequence[int], worth: float) -> tuple[list[int], float] | None:
    """How much of every row's match to draft, and the tokens that a row is expected to commit, where that gains more than the
    current drafter does in the same time. A longer draft is worth its scoring at the rate of lookups: what is copied belongs to
    the text and is not there in the next step as well."""
    rows, costs = len(matches), state.costs
    length_price = max(worth, state.lookups.tokens / state.lookups.time)
    most = costs.scoring.reach
    survival = [price.survivals(state.matches.predict(match, most)) if match else [] for match in matches]
    drafts = price.allocate(survival, length_price, costs.scoring if rows == 1 else lambda n: rows * costs.scoring(n / rows))
    tokens = 1 + sum(sum(chain[:kept]) for chain, kept in zip(survival, drafts, strict=True)) / rows
    time = costs.scoring(1 + sum(drafts) / rows) + costs.fixed + costs.lookup
    return (drafts, tokens) if tokens > worth * time else None


def _look_by_drafting(state: State, current: str | None, worth: float) -> Plan | None:
    """Steps of a drafter whose shadow is DEAR: as long as these are, they commit tokens as well."""
    if state.shadow_account < LEAST_LOOK:
        return None
    best, chosen, longest = max([1.0, *state.rates().values()]), None, 0.0
    for name, cost in state.costs.shadows.items():
        if cost.value < DEAR or name == current or state.drafters[name].searches:
            continue
        value = _worth_a_look(state, name, best, current)
        if value > longest:
            chosen, longest = name, value
    if chosen is None:
        return None
    likely = len(TRIED_ON) // 2
    time = state.costs.drafts[chosen](likely) + state.costs.scoring_of(chosen)(likely + 1)
    if state.shadow_account < min(LOOK_STEPS * time * (1 - 1 / worth), MOST_SAVED):
        return None
    steps = int(state.shadow_account / (time * max(1 - state.rate(chosen) / worth, LEAST_LOSS)))
    steps = max(LOOK_STEPS, min(steps, MOST_LOOK_STEPS))
    return Plan(chosen, worth, current, f"{chosen} is looked at", thresholds=TRIED_ON, trial=True, steps=steps)


def _worth_a_look(state: State, name: str, best: float, current: str | None) -> float:
    """Tokens since a drafter was graded, of one of which next to nothing is known thrice as many; where nothing drafts, times
    the chance that it is faster than plain decoding, unless that was long ago. 0 for one that was graded of late, or that is
    hardly faster than the `best` rate. current: the drafter that drafts."""
    drafter, rules = state.drafters[name], state.rules
    stale, young = state.position - drafter.seen, drafter.rate.usual.steps < YOUNG
    if stale < (rules.window // 2 if young else rules.window):
        return 0.0
    steps = drafter.rate.now.faded(state.position, rules.half_life).steps
    if state.rate(name) * (1 + 1.5 / (steps + 1) ** 0.5) < best and stale < rules.look_again:
        return 0.0
    worth = min(stale, 4000) * (3 if young else 1)
    return worth * (_chance(state, name) if current is None and stale < rules.look_again else 1.0)


def _chance(state: State, name: str) -> float:
    """That a drafter is faster than plain decoding: logistic in the distance of its rate in standard deviations."""
    known = state.drafters[name].rate.usual.faded(state.position, state.rules.usual_half_life)
    deviation = DEVIATION / (known.steps + 1) ** 0.5
    return 1 / (1 + math.exp(min(LOGISTIC * (1 - state.rate(name)) / deviation, MOST_EXPONENT)))


def due(state: State, lag: Mapping[str, int] = MappingProxyType({})) -> str | None:
    """The drafter whose shadow is worth most for its cost, where the account can pay it by now; None for none. A dear one is
    saved for: cheap ones do not spend what it needs. lag: drafter -> tokens that it has to read, where they are more than a
    window."""
    shadows = state.costs.shadows
    if not shadows or state.position < state.rules.listening or state.ledger.overdrawn:
        return None
    if state.shadow_account < state.cheapest_shadow:
        return None
    best, chosen, longest = max([1.0, *state.rates().values()]), None, 0.0
    for name, cost in shadows.items():
        drafter = state.drafters[name]
        if (cost.value >= DEAR and not drafter.searches) or (name == state.current and not drafter.unsure):
            continue
        value = _worth_a_look(state, name, best, state.current) / (cost.value * state.windows(lag.get(name, 0)))
        if value > longest:
            chosen, longest = name, value
    if chosen is None:
        return None
    needed = shadows[chosen].value * state.windows(lag.get(chosen, 0))
    return chosen if state.shadow_account >= min(needed, MOST_SAVED) else None
