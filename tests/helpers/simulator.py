"""A world in which drafters are right and wrong by chance, on machines with known costs: what a controller decides about,
without a model. The text is given (greedy decoding): a drafter's token is the text's at a place or it is not, so that a policy
changes the time alone. Controllers see noisy times; what they are judged by are the mean times.

The shapes of the machines are measured ones, tasks and noise are invented: what carries over are relations, not figures.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low

import numpy as np

from skipstone.control import control, learning, price
from skipstone.control.costs import Cost, Costs, Line, Scoring, typical
from skipstone.control.state import LOOKUP, PLAIN, PROBE, RECYCLE, WARM_AFTER, Done, Drafter, Judged, Plan, Ranks, Rules, State

RULES = Rules()
EXITS = ("E4", "E6", "E8", "E12")  # after so many of 24 layers
SELF = (*EXITS, "skip")
DRAFTERS = (*SELF, "draft model")
COLD = (1.2, 1.08, 1.03)
"""Times as long as among plain steps that the first, second, ... plain step after a draft takes: another model, or another part
of it, stands in the caches. Invented, of about the size that nano's steps have."""


class Machine:
    """Mean times in plain steps. scoring(n): a pass over n tokens. drafts: drafter -> a draft step. shadows: drafter -> grading
    it on 32 tokens. fixed: of a step that drafts. lookup: of finding a draft in the text."""

    LOOKUP = 0.01

    def __init__(self, points: Sequence[tuple[int, float]], head: float, fixed: float, wait: float = 0.0) -> None:
        places, values = zip(*points, strict=True)
        self.fixed = fixed
        self.table = [
            0.0,
            *(float(np.interp(n, places, values)) if n <= places[-1] else values[-1] * n / places[-1] for n in range(1, 400)),
        ]
        self.drafts = {f"E{e}": e / 24 * (1 - head) + head + wait for e in (4, 6, 8, 12)}
        self.drafts |= {"skip": 0.55 * (1 - head) + head + wait, "draft model": 0.2 + wait}
        several = self.table[32]
        self.shadows: dict[str, float] = dict.fromkeys(EXITS, head * several + 0.01)
        self.shadows |= {"skip": 0.55 * several, "draft model": 0.2 * several}

    def scoring(self, tokens: int) -> float:
        return self.table[tokens]

    def step(self, drafter: str, drafts: int) -> float:
        return drafts * self.drafts[drafter] + self.scoring(drafts + 1) + self.fixed


MACHINES = {
    "nano": Machine([(1, 1), (8, 1.05), (16, 1.15), (32, 1.4), (64, 2.0), (128, 3.4)], 0.01, 0.04),
    "1B on a CPU": Machine([(1, 1), (4, 1.02), (8, 1.06), (16, 1.4), (32, 2.05), (64, 3.9), (128, 7.6)], 0.06, 0.01),
    "8B on a GPU": Machine([(1, 1), (8, 1.03), (16, 1.06), (32, 1.12), (64, 1.28), (128, 1.7), (256, 2.8)], 0.07, 0.03, 0.02),
    "float32 cliff": Machine([(1, 1), (2, 2.2), (8, 2.7), (16, 3.6), (32, 5.2), (64, 9)], 0.02, 0.04),
}


@dataclass(frozen=True)
class Task:
    """acceptance: mean of every drafter. copied, span: share of tokens that stand in copied passages, and the mean length of
    one. false_matches, right_by_chance: how often the text matches elsewhere, and how often such a match goes on rightly.
    recycled: how often the first kept token is right. slope, offset: of confidence in the logit of acceptance."""

    acceptance: tuple[float, ...]
    copied: float
    span: float
    false_matches: float
    right_by_chance: float
    recycled: float
    slope: float
    offset: float


TASKS = {
    "code": Task((0.62, 0.72, 0.78, 0.86, 0.93, 0.80), 0.15, 12, 0.40, 0.35, 0.46, 1.3, 0.6),
    "chat": Task((0.42, 0.52, 0.60, 0.72, 0.86, 0.68), 0.03, 6, 0.25, 0.20, 0.38, 1.2, 0.9),
    "math": Task((0.52, 0.64, 0.72, 0.82, 0.91, 0.76), 0.08, 6, 0.35, 0.30, 0.42, 1.4, 0.2),
    "edit": Task((0.66, 0.76, 0.82, 0.89, 0.95, 0.84), 0.70, 40, 0.40, 0.35, 0.50, 1.3, 0.6),
    "rag": Task((0.48, 0.60, 0.68, 0.78, 0.89, 0.74), 0.35, 9, 0.35, 0.30, 0.40, 1.0, 0.5),
    "creative": Task((0.05, 0.09, 0.14, 0.28, 0.45, 0.30), 0.005, 4, 0.10, 0.08, 0.12, 0.9, 1.2),
    "easy": Task((0.88, 0.92, 0.94, 0.96, 0.98, 0.95), 0.20, 20, 0.40, 0.50, 0.60, 1.3, 0.2),
    "half": Task((0.20, 0.28, 0.35, 0.50, 0.70, 0.45), 0.01, 4, 0.20, 0.15, 0.25, 0.8, 1.0),
}


def logit(chance: float) -> float:
    return math.log(chance / (1 - chance))


class World:
    """A text of phases (task, tokens), and what could be observed at every place of it.

    match, match_right: the length of the longest match before a place, and how many tokens of its continuation are the text's.
    conf[d], wrong_conf[d]: how sure a drafter is where its draft is right so far, and where it is not. right[d]: whether its
    token is the text's. run[d]: how many in a row are. rank: of a token among those kept for the one before it. starts: places
    where a request begins."""

    def __init__(self, phases: Sequence[tuple[str, int]], seed: int, request: int | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.length = length = sum(count for _, count in phases)
        self.tasks = [TASKS[name] for name, count in phases for _ in range(count)]
        ends = np.cumsum([0, *(count for _, count in phases)])[:-1].tolist()
        self.starts = set(range(0, length, request) if request else ends)
        noise, hardness = rng.standard_normal(length), np.empty(length)
        hardness[0] = noise[0]
        for place in range(1, length):
            hardness[place] = 0.5 * hardness[place - 1] + math.sqrt(0.75) * noise[place]
        span = self._copies(rng)
        hardness = hardness + 0.7 * (span > 0)
        self.conf: dict[str, list[float]] = {}
        self.wrong_conf: dict[str, list[float]] = {}
        self.right: dict[str, list[bool]] = {}
        self.run: dict[str, list[int]] = {}
        slope = np.array([task.slope for task in self.tasks])
        offset = np.array([task.offset for task in self.tasks])
        spread = 2.0
        for index, name in enumerate(DRAFTERS):
            widened = math.sqrt(1 + math.pi * spread * spread / 8)
            mean = np.array([logit(task.acceptance[index]) * widened for task in self.tasks])
            own = mean + spread * (0.8 * hardness + 0.6 * rng.standard_normal(length)) - spread * 0.28 * (span > 0)
            right = rng.random(length) < 1 / (1 + np.exp(-own))
            sure = slope * (own + 0.8 * rng.standard_normal(length)) + offset
            lost = slope * (mean - 0.7 + spread * rng.standard_normal(length)) + offset
            run = [0] * (length + 1)
            for place in range(length - 1, -1, -1):
                run[place] = run[place + 1] + 1 if right[place] else 0
            self.right[name], self.run[name] = right.tolist(), run
            self.conf[name] = (1 / (1 + np.exp(-np.clip(sure, -8, 8)))).tolist()
            self.wrong_conf[name] = (1 / (1 + np.exp(-np.clip(lost, -8, 8)))).tolist()
        first = np.array([task.recycled for task in self.tasks])
        chance = np.clip(1 / (1 + np.exp(-(np.log(first / (1 - first)) * 1.3 + 1.2 * hardness))), 0.02, 0.98)
        later, missing = rng.geometric(0.45, length), rng.random(length) < np.where(first > 0.3, 0.45, 0.8)
        self.rank = np.where(rng.random(length) < chance, 0, np.where(missing, 99, later)).astype(int).tolist()

    def _copies(self, rng: np.random.Generator) -> np.ndarray:
        """Copied passages, and the matches that they and chance make. Returns how many tokens of its passage are left at a
        place."""
        self.match, self.match_right, span, place = [0] * self.length, [0] * self.length, np.zeros(self.length, int), 0
        while place < self.length:
            task = self.tasks[place]
            gap = 1 + int(rng.exponential(max(1.0, task.span * (1 - task.copied) / task.copied)))
            first, last = min(self.length, place + gap), min(self.length, place + gap + 2 + int(rng.exponential(task.span)))
            span[first:last] = np.arange(last - first, 0, -1)
            for one in range(first + 1, last):
                self.match[one] = one - first + 1
            place = last
        for place, task in enumerate(self.tasks):
            if span[place] and self.match[place]:
                self.match_right[place] = min(int(span[place]), rng.geometric(0.015) - 1)
            elif rng.random() < task.false_matches:
                self.match[place] = int(rng.choice([1, 2, 3], p=[0.55, 0.3, 0.15]))
                self.match_right[place] = rng.geometric(1 - task.right_by_chance - 0.05 * self.match[place]) - 1
        return span

    def confidence(self, drafter: str, start: int, drafts: int) -> float:
        """Of a drafter's next token, behind so many drafts that begin at a place."""
        place = start + drafts
        if place >= self.length:
            return 0.5
        return (self.conf if self.run[drafter][start] >= drafts else self.wrong_conf)[drafter][place]


# --------------------------------------------------------------------------------------------- fixed choices, in hindsight


def walk(world: World, place: int, paths: frozenset[tuple[int, ...]]) -> int:
    """How many tokens of a tree of ranks are the text's."""
    path: tuple[int, ...] = ()
    while place + len(path) < world.length and (*path, world.rank[place + len(path)]) in paths:
        path = (*path, world.rank[place + len(path)])
    return len(path)


Fallback = Callable[[int], tuple[int, float]]
"""place -> (drafts accepted there, time of the step)."""


def rate(world: World, step: Fallback) -> float:
    """Tokens a plain step."""
    place, time = 0, 0.0
    while place < world.length:
        accepted, took = step(place)
        time += took
        place += accepted + 1
    return world.length / time


def chain(world: World, machine: Machine, drafter: str, drafts: int) -> Fallback:
    run, time = world.run[drafter], machine.step(drafter, drafts)
    return lambda place: (min(drafts, run[place]), time)


def recycled(world: World, machine: Machine, nodes: int) -> Fallback:
    paths = ranked_tree(nodes)
    time = machine.scoring(nodes + 1) + machine.fixed + 0.02
    return lambda place: (walk(world, place, paths), time)


def plainly(machine: Machine) -> Fallback:
    return lambda _: (0, machine.scoring(1) + Machine.LOOKUP)


def looked_up(world: World, machine: Machine, drafts: int, least: int, otherwise: Fallback) -> Fallback:
    time = machine.scoring(drafts + 1) + machine.fixed + Machine.LOOKUP
    return lambda place: (min(drafts, world.match_right[place]), time) if world.match[place] >= least else otherwise(place)


def ranked_tree(nodes: int) -> frozenset[tuple[int, ...]]:
    """The likeliest paths of ranks where every token's rank has the same chances."""
    return paths_of(price.tree((0.42, 0.14, 0.09, 0.05, 0.03), 0.0, lambda _: 0.0, most=nodes, depth=8))


def best_fixed(world: World, machine: Machine, drafters: Sequence[str], recycling: bool = True) -> float:
    """The rate of the best of about a hundred settings that do not change: every drafter with every length, lookups alone and
    before each of these, trees of recycled tokens, plain decoding."""
    lengths = (1, 2, 3, 4, 6, 8, 12, 16)
    chains = sorted(
        (
            (rate(world, one), index, one)
            for index, one in enumerate(chain(world, machine, name, k) for name in drafters for k in lengths)
        ),
        reverse=True,
    )
    found = [1.0, *(one for one, _, _ in chains)]
    found += [rate(world, looked_up(world, machine, k, least, plainly(machine))) for k in (4, 10, 20) for least in (1, 2, 4)]
    before = [one for _, _, one in chains[:2]]
    if recycling:
        trees = sorted(
            ((rate(world, one), n, one) for n in (4, 8, 16, 32, 60) if (one := recycled(world, machine, n))), reverse=True
        )
        found += [one for one, _, _ in trees]
        before += [one for _, _, one in trees[:2]]
    found += [rate(world, looked_up(world, machine, k, least, one)) for one in before for k in (10, 20) for least in (2, 4, 8)]
    return max(found)


# ------------------------------------------------------------------------------------------------------- workloads


@dataclass(frozen=True)
class Workload:
    """phases of a text on a machine. request: tokens of a request, where phases are none."""

    machine: str
    phases: list[tuple[str, int]]
    drafters: tuple[str, ...] = SELF
    request: int | None = None

    def world(self, seed: int) -> World:
        return World(self.phases, seed, self.request)


def requests_of(task: str, tokens: int, each: int = 300) -> list[tuple[str, int]]:
    return [(task, each)] * (tokens // each)


def mixed(seed: int, tokens: int, low: int = 128, high: int = 512) -> list[tuple[str, int]]:
    """Requests of six tasks in turns that nobody foresees."""
    dice, found = random.Random(seed), []
    while sum(count for _, count in found) < tokens:
        found.append((dice.choice(["code", "chat", "math", "edit", "rag", "creative"]), dice.randrange(low, high)))
    return found


def workloads(tokens: int, seed: int) -> dict[str, Workload]:
    flips = [(("easy", "creative")[turn % 2], 40) for turn in range(tokens // 40)]
    return {
        "code, nano": Workload("nano", requests_of("code", tokens)),
        "chat, nano": Workload("nano", requests_of("chat", tokens)),
        "easy, nano": Workload("nano", requests_of("easy", tokens)),
        "code, 1B on a CPU": Workload("1B on a CPU", requests_of("code", tokens)),
        "code with a draft model, 8B on a GPU": Workload("8B on a GPU", requests_of("code", tokens), DRAFTERS),
        "edit, 8B on a GPU": Workload("8B on a GPU", requests_of("edit", tokens)),
        "mixed, nano": Workload("nano", mixed(seed, tokens)),
        "creative, nano": Workload("nano", requests_of("creative", tokens)),
        "creative, 1B on a CPU": Workload("1B on a CPU", requests_of("creative", tokens)),
        "break-even, nano": Workload("nano", requests_of("half", tokens)),
        "code, float32 cliff": Workload("float32 cliff", requests_of("code", tokens)),
        "flips, nano": Workload("nano", flips, request=400),
    }


@dataclass
class Log:
    """What a run came to. rate: tokens a plain step. requests: (tokens, time) of each. kinds: steps of each. switches: of the
    drafter. probing: share of the time that went into shadows and plain probes beyond what these committed."""

    rate: float = 0.0
    requests: list[tuple[int, float]] = field(default_factory=list)
    kinds: dict[str, int] = field(default_factory=dict)
    switches: int = 0
    probing: float = 0.0

    def worst_request(self, least: int = 100) -> float:
        """The least rate of a request of so many tokens."""
        return min((tokens / time for tokens, time in self.requests if tokens >= least), default=1.0)


# ------------------------------------------------------------------------------------------------------ the controller


def first_state(
    machine: Machine, drafters: Sequence[str], *, recycling: bool = True, believed: float = 1.0, rules: Rules = RULES
) -> State:
    """What a controller knows at first: costs measured on this machine, those of drafting times `believed`."""
    costs = Costs(
        plain=Cost(1.0, 3),
        scoring=Scoring.of({n: machine.scoring(n) for n in (2, 4, 8, 16, 32, 64)}),
        fixed=machine.fixed,
        drafts={name: Line(believed * machine.drafts[name], 0.0, control.FEW + 1) for name in drafters},
        shadows={name: Cost(machine.shadows[name], 1) for name in drafters},
        lookup=Machine.LOOKUP,
    )
    return State(costs, {name: Drafter() for name in drafters}, rules, ranks=Ranks() if recycling else None)


def noise(dice: random.Random) -> float:
    """A factor of measured times: a twenty-fifth up or down, and now and then far more. Its mean is 1."""
    return math.exp(dice.gauss(0, 0.04) - 0.0008) * (2.5 if dice.random() < 0.005 else 1.0) / 1.0075


def outcome(world: World, machine: Machine, state: State, plan: Plan, place: int) -> tuple[Plan, int, int, float, list[float]]:
    """What becomes of a plan at a place: what was really done, drafts that are scored, those that are accepted, the mean time,
    and how sure a drafter was of each."""
    if plan.kind == LOOKUP:
        (drafts,) = plan.drafts
        time = machine.scoring(drafts + 1) + machine.fixed + Machine.LOOKUP
        return plan, drafts, min(drafts, world.match_right[place]), time, []
    if plan.kind == RECYCLE:
        assert plan.tree is not None
        drafts = len(plan.tree.parents)
        return plan, drafts, walk(world, place, paths_of(plan.tree)), machine.scoring(drafts + 1) + machine.fixed + 0.02, []
    confidences, survival = list[float](), 1.0
    if plan.kind in state.drafters:
        predict = state.drafters[plan.kind].calibration.predict
        while len(confidences) < len(plan.thresholds) and survival >= plan.thresholds[len(confidences)]:
            confidences.append(world.confidence(plan.kind, place, len(confidences)))
            survival *= predict(confidences[-1])
    drafts = len(confidences)
    if not drafts:
        return plan if plan.kind == PROBE else replace(plan, kind=PLAIN), 0, 0, machine.scoring(1), []
    return plan, drafts, min(drafts, world.run[plan.kind][place]), machine.step(plan.kind, drafts), confidences


def plain_steps(
    turns: range, cold: Sequence[float], dice: random.Random, pace: float
) -> tuple[float, tuple[int, float], float]:
    """What plain steps take in the mean, what is seen of those that are warm, as in `Done`, and their lower median. turns: of
    each, how many plain ones came before it."""
    each = [cold[turn] if turn < len(cold) else 1.0 for turn in turns]
    warm = [one * noise(dice) * pace for one, turn in zip(each, turns, strict=True) if turn >= WARM_AFTER]
    return sum(each), (len(warm), typical(warm)), median_low(warm or [0.0])


def drive(
    world: World,
    machine: Machine,
    state: State,
    seed: int = 0,
    *,
    lookups: bool = True,
    learns: bool = True,
    pace: Callable[[int], float] = lambda _: 1.0,
    cold: Sequence[float] = COLD,
) -> Log:
    """A controller over a whole text. learns: False lets it never see what a draft step costs. pace: place -> how much longer
    everything takes there than it mostly does; what it is judged by does not count that. cold: as COLD."""
    dice, log, place, total, probing = random.Random(seed), Log(), 0, 0.0, 0.0
    began, taken, in_a_row = 0, 0.0, len(cold)
    while place < world.length:
        if place in world.starts and place:
            log.requests.append((place - began, taken))
            state, began, taken = learning.begin(state), place, 0.0
        shadowed = 0.0
        if (name := control.due(state)) is not None:
            first = max(0, place - state.rules.window, state.drafters[name].seen)
            state = learning.shadow(state, name, world.conf[name][first:place], world.right[name][first:place])
            shadowed = machine.shadows[name]
        match = world.match[place] if lookups else 0
        plan = control.decide(state, [match])
        log.switches += plan.current != state.current
        log.kinds[plan.kind] = log.kinds.get(plan.kind, 0) + 1
        plan, drafts, accepted, time, confidences = outcome(world, machine, state, plan, place)
        matches = []
        seen, tokens, warm, median = noise(dice) * pace(place), accepted + 1, None, None
        if plan.kind in (PLAIN, PROBE):
            tokens = min(plan.steps, world.length - place) if plan.kind == PROBE else 1
            of_all, warm, median = plain_steps(range(in_a_row, in_a_row + tokens), cold, dice, pace(place))
            time, in_a_row = time * of_all, in_a_row + tokens
        else:
            in_a_row = 0
        if match:
            matches.append(Judged(match, world.match_right[place], max(tokens, drafts if plan.kind == LOOKUP else 0)))
        done = Done(
            tokens=tokens,
            seconds=time * seen,
            confidences=[(one, index < accepted) for index, one in enumerate(confidences[: accepted + 1])],
            verified=drafts,
            passes=len(confidences),
            drafting=machine.drafts[plan.kind] * len(confidences) * seen if confidences and learns else None,
            scoring=machine.scoring(drafts + 1) * seen,
            matches=matches,
            ranks=world.rank[place : place + tokens],
            aside_seconds=shadowed * pace(place),
            steps=tokens if plan.kind == PROBE else 1,
            warm=warm,
            warm_median=median if warm is not None and warm[0] else None,
        )
        state = learning.observe(state, plan, done)
        total, taken, place = total + time + shadowed, taken + time + shadowed, place + tokens
        probing += shadowed + (tokens * (1 - 1 / plan.price) if plan.kind == PROBE else 0.0)
    log.requests.append((place - began, taken))
    log.rate, log.probing = place / total, probing / total
    return log


def paths_of(tree: price.RankTree) -> frozenset[tuple[int, ...]]:
    """Every node of a tree as the ranks that lead to it."""
    paths: list[tuple[int, ...]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), rank))
    return frozenset(paths)
