"""Simulated texts and machines for the policy of `auto`, without a model.

The text is given, so a policy changes only the time. Policies see noisy times and are judged by mean times, in plain steps. The
shapes of the first four machines are measured. Tasks and noise are invented.
"""

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from skipstone.policy.choose_drafter import StepResult

EXITS = ("E4", "E6", "E8", "E12")
"""Early exits of a model with 24 layers."""
SELF = (*EXITS, "skip")
DRAFTERS = (*SELF, "draft model")
COLD = (1.2, 1.08, 1.03)
"""Times of the first three plain steps after a draft, which has filled the caches."""
LOOKUP, RECYCLING = 0.01, 0.02
"""Times of the host to find a draft in the text, and to build a tree of recycled tokens."""
WINDOW = 32


class Machine:
    """Mean times in plain steps. scoring(n): a pass over n tokens of every row. drafts: drafter -> a draft step. replays:
    drafter -> a replay. fixed: of a step that drafts. schedules: drafter with its own schedule -> (drafts, time) of a step."""

    def __init__(
        self, points: Sequence[tuple[int, float]], head: float, fixed: float, wait: float = 0.0, *,
        draft_model: float = 0.2, rows: int = 1, schedules: Mapping[str, tuple[int, float]] | None = None,
    ) -> None:  # fmt: skip
        self.fixed, self.rows, self.schedules = fixed, rows, dict(schedules or {})
        places, values = zip(*points, strict=True)
        beyond = values[-1] / places[-1]
        self._table = [float(np.interp(n, places, values)) if n <= places[-1] else beyond * n for n in range(1700)]
        self.drafts = {f"E{e}": e / 24 * (1 - head) + head + wait for e in (4, 6, 8, 12)}
        self.drafts |= {"skip": 0.55 * (1 - head) + head + wait, "draft model": draft_model + wait}
        several = self._table[WINDOW]
        self.replays: dict[str, float] = dict.fromkeys(EXITS, head * several + 0.01)
        self.replays |= {"skip": 0.55 * several, "draft model": draft_model * several}

    def scoring(self, tokens: float) -> float:
        at = tokens * self.rows
        low = int(at)
        return (self._table[low] + (at - low) * (self._table[low + 1] - self._table[low])) / self._table[self.rows]


MACHINES = {
    "nano": Machine([(1, 1), (8, 1.05), (16, 1.15), (32, 1.4), (64, 2.0), (128, 3.4)], 0.01, 0.04),
    "1B on a CPU": Machine([(1, 1), (4, 1.02), (8, 1.06), (16, 1.4), (32, 2.05), (64, 3.9), (128, 7.6)], 0.06, 0.01),
    "8B on a GPU": Machine([(1, 1), (8, 1.03), (16, 1.06), (32, 1.12), (64, 1.28), (128, 1.7), (256, 2.8)], 0.07, 0.03, 0.02),
    "float32 cliff": Machine([(1, 1), (2, 2.2), (8, 2.7), (16, 3.6), (32, 5.2), (64, 9)], 0.02, 0.04),
}


@dataclass(frozen=True)
class Task:
    """acceptance: mean of every drafter, in the world's order. copied: share of tokens in copied passages. span: their mean
    length. false_matches: how often the text matches elsewhere by chance. right_by_chance: how often such a match continues
    rightly. recycled: how often the first kept token is right. slope, offset: of the confidence in the logit of acceptance."""

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


@dataclass(frozen=True)
class Process:
    """How hard places follow each other. spread: standard deviation of the logit of acceptance. memory: autocorrelation of the
    hardness. regime: mean tokens of an easy or a hard passage, 0 for none. swing: how much easier or harder these are."""

    spread: float = 2.0
    memory: float = 0.5
    regime: float = 0.0
    swing: float = 0.0


class World:
    """A text of phases (task, tokens), and what could be observed at every place of it.

    match, match_right: length of the longest match before a place, and how many tokens of its continuation are the text's.
    conf[d], wrong_conf[d]: confidence of a drafter that is right so far, and of one that is not. right[d]: whether its token is
    the text's. run[d]: how many in a row are. rank: of a token among those kept for the one before it. starts: places where a
    request begins."""

    def __init__(
        self, phases: Sequence[tuple[str, int]], seed: int, request: int | None = None, *,
        tasks: Mapping[str, Task] = TASKS, drafters: Sequence[str] = DRAFTERS, process: Process = Process(),
    ) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.length = length = sum(count for _, count in phases)
        self.tasks = [tasks[name] for name, count in phases for _ in range(count)]
        ends = np.cumsum([0, *(count for _, count in phases)])[:-1].tolist()
        self.starts = set(range(0, length, request) if request else ends)
        noise, hardness = rng.standard_normal(length), np.empty(length)
        hardness[0] = noise[0]
        for place in range(1, length):
            hardness[place] = process.memory * hardness[place - 1] + math.sqrt(1 - process.memory**2) * noise[place]
        if process.regime:
            flips = rng.random(length) < 1 / process.regime
            hardness = hardness + process.swing * (2 * (np.cumsum(flips) % 2) - 1)
        span = self._copies(rng)
        hardness = hardness + 0.7 * (span > 0)
        self.conf: dict[str, list[float]] = {}
        self.wrong_conf: dict[str, list[float]] = {}
        self.right: dict[str, list[bool]] = {}
        self.run: dict[str, list[int]] = {}
        slope = np.array([task.slope for task in self.tasks])
        offset = np.array([task.offset for task in self.tasks])
        spread = process.spread
        for index, name in enumerate(drafters):
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


def noise(dice: random.Random) -> float:
    """A factor of measured times: four hundredths up or down, and now and then far more. Its mean is 1."""
    return math.exp(dice.gauss(0, 0.04) - 0.0008) * (2.5 if dice.random() < 0.005 else 1.0) / 1.0075


class Simulation:
    """Runs steps of one text per row and keeps the true time. `total`: plain steps so far.

    slowdown: place -> factor of all times that are seen, which the true time does not count. drift: place -> factor of the time
    of draft steps. compile_time: plain steps that the first pass over each number of tokens takes more."""

    def __init__(
        self, worlds: Sequence[World], machine: Machine, seed: int = 0, *, slowdown: Callable[[int], float] | None = None,
        drift: Callable[[int], float] | None = None, compile_time: float = 0.0,
    ) -> None:  # fmt: skip
        self.worlds, self.machine, self.dice = list(worlds), machine, random.Random(seed)
        self.slowdown, self.drift, self.compile_time, self.looks_up = slowdown, drift, compile_time, True
        self.places, self.length = [0] * len(self.worlds), self.worlds[0].length
        self.total, self.plain_in_a_row, self.compiled = 0.0, len(COLD), {1}
        self.requests: list[tuple[float, float]] = []  # (tokens, time)
        self.marks: list[tuple[float, float]] = []  # (place, total) behind every step
        self.kinds: dict[str, int] = {}
        self._began = 0.0, 0.0
        self._starts = [*sorted(self.worlds[0].starts - {0}), math.inf]

    @property
    def position(self) -> float:
        return sum(self.places) / len(self.places)

    @property
    def finished(self) -> bool:
        return self.position >= self.length

    def begins_request(self) -> bool:
        """Whether a request begins here; ends the one before."""
        if self.position < self._starts[0]:
            return False
        self.requests.append((self.position - self._began[0], self.total - self._began[1]))
        self._began = self.position, self.total
        while self.position >= self._starts[0]:
            self._starts.pop(0)
        return True

    def rate(self, first: float = 0.0) -> float:
        """Tokens a plain step, behind a place."""
        place, total = next(((p, t) for p, t in self.marks if p >= first), (0.0, 0.0)) if first else (0.0, 0.0)
        return (self.position - place) / (self.total - total)

    def matches(self) -> list[int]:
        return [world.match[place] for world, place in self._rows()] if self.looks_up else []

    def replay(self, name: str, row: int = 0) -> tuple[list[float], list[bool], float]:
        """(confidences, rights, seconds) of a drafter on the latest tokens of a row."""
        place, time = self.places[row], self.machine.replays[name]
        places = [one % self.length for one in range(max(0, place - WINDOW), place)]
        world, seen = self.worlds[row], time * self._seen()
        self.total += time
        return [world.conf[name][one] for one in places], [world.right[name][one] for one in places], seen

    def plain(self) -> StepResult:
        turn = self.plain_in_a_row
        self.plain_in_a_row += 1
        time = COLD[turn] if turn < len(COLD) else 1.0
        return self._step("plain", [0] * len(self.places), StepResult(0.0, time, warm_steps=int(turn >= 2)))

    def lookup(self, drafts: Sequence[int]) -> StepResult:
        """drafts: of every row."""
        accepted = [min(count, world.match_right[place]) for count, (world, place) in zip(drafts, self._rows(), strict=True)]
        result = StepResult(0.0, LOOKUP, drafts=sum(drafts) / len(drafts))
        return self._step("lookup", accepted, result, longest=max(drafts))

    def recycle(self, parents: Sequence[int], ranks: Sequence[int]) -> StepResult:
        nodes, accepted = {pair: node for node, pair in enumerate(zip(parents, ranks, strict=True))}, []
        for world, place in self._rows():
            node, count = -1, 0
            while place + count < world.length and (node, world.rank[place + count]) in nodes:
                node, count = nodes[node, world.rank[place + count]], count + 1
            accepted.append(count)
        return self._step("recycle", accepted, StepResult(0.0, RECYCLING, drafts=len(parents)))

    def own_schedule(self, name: str) -> StepResult:
        drafts, time = self.machine.schedules[name]
        accepted = [min(drafts, world.run[name][place]) for world, place in self._rows()]
        time -= self.machine.scoring(drafts + 1) + self.machine.fixed
        return self._step(name, accepted, StepResult(0.0, time, drafts=drafts))

    def chain(
        self, name: str, thresholds: Sequence[float], shared: Sequence[float], predict: Callable[[float], float]
    ) -> StepResult:
        """Drafts while the survival of a row reaches the thresholds. shared: of one of several rows, which draft on if their
        joint survival above it pays for the step."""
        worlds, passes = list(self._rows()), 0
        rows = range(len(worlds))
        survival, sure = [1.0] * len(rows), [list[float]() for _ in rows]
        going = list(rows) if thresholds and thresholds[0] <= 1 else []
        while going and passes < len(thresholds):
            for row in going:
                world, place = worlds[row]
                sure[row].append(world.confidence(name, place, passes))
                survival[row] *= predict(sure[row][-1])
            passes += 1
            alone = thresholds[passes] if passes < len(thresholds) else math.inf
            floor = alone if not shared else shared[passes] if passes < len(shared) else math.inf
            going = [row for row in going if survival[row] >= floor]
            if shared and going and sum(survival[row] - floor for row in going) < len(rows) * (alone - floor):
                going = []
        if not passes:
            return self.plain()
        accepted = [min(len(one), world.run[name][place]) for one, (world, place) in zip(sure, worlds, strict=True)]
        judged = [(c, i < count) for one, count in zip(sure, accepted, strict=True) for i, c in enumerate(one[: count + 1])]
        time = passes * self.machine.drafts[name] * (self.drift(int(self.position)) if self.drift else 1.0)
        mean = sum(map(len, sure)) / len(rows)
        result = StepResult(0.0, time, drafts=mean, passes=passes, drafting=time, confidences=judged)
        return self._step(name, accepted, result, longest=max(map(len, sure)))

    def _rows(self) -> Iterator[tuple[World, int]]:
        return ((world, place % self.length) for world, place in zip(self.worlds, self.places, strict=True))

    def _seen(self) -> float:
        return noise(self.dice) * (self.slowdown(int(self.position)) if self.slowdown else 1.0)

    def _step(self, kind: str, accepted: Sequence[int], result: StepResult, *, longest: int = 0) -> StepResult:
        """The step of such accepted drafts. result.seconds: without scoring."""
        scoring, extra, width = 0.0, 0.0, max(longest, round(result.drafts)) + 1
        if result.drafts:
            self.plain_in_a_row, scoring = 0, self.machine.scoring(result.drafts + 1)
            result.seconds += scoring + self.machine.fixed
        if self.compile_time and width not in self.compiled:
            self.compiled.add(width)
            extra, result.preparing = self.compile_time, True
        seen, matches = self._seen(), []
        for row, (world, place) in enumerate(list(self._rows())):
            tokens = accepted[row] + 1
            if self.looks_up and (match := world.match[place]):
                compared = max(tokens, round(result.drafts) if kind == "lookup" else 0)
                matches.append((match, min(world.match_right[place], compared), compared))
            if not row:
                result.ranks = world.rank[place : place + tokens]
            self.places[row] += tokens
        result.tokens, result.matches = sum(accepted) / len(accepted) + 1, matches
        self.total += result.seconds + extra
        self.kinds[kind] = self.kinds.get(kind, 0) + 1
        result.seconds = (result.seconds + extra) * seen
        result.drafting, result.scoring = result.drafting * seen, scoring * seen + extra
        result.fixed = max(result.seconds - result.drafting - result.scoring, 0.0) if result.drafts else 0.0
        result.warm_seconds = result.seconds * result.warm_steps
        self.marks.append((self.position, self.total))
        return result


@dataclass(frozen=True)
class Workload:
    """phases of a text on a machine. request: tokens of a request; None if each phase is one. rows: texts of a batch. slowdown,
    drift, compile_time: as in `Simulation`."""

    machine: Machine
    phases: list[tuple[str, int]]
    drafters: tuple[str, ...] = SELF
    request: int | None = None
    tasks: Mapping[str, Task] = field(default_factory=lambda: TASKS)
    known: tuple[str, ...] = DRAFTERS
    process: Process = Process()
    slowdown: Callable[[int], float] | None = None
    drift: Callable[[int], float] | None = None
    compile_time: float = 0.0

    def world(self, seed: int) -> World:
        return World(self.phases, seed, self.request, tasks=self.tasks, drafters=self.known, process=self.process)

    def simulation(self, seed: int) -> Simulation:
        worlds = [self.world(17 + 101 * seed + 1009 * row) for row in range(self.machine.rows)]
        options = {"slowdown": self.slowdown, "drift": self.drift, "compile_time": self.compile_time}
        return Simulation(worlds, self.machine, seed, **options)  # type: ignore[arg-type]


def requests_of(task: str, tokens: int, each: int = 300) -> list[tuple[str, int]]:
    return [(task, each)] * (tokens // each)


def mixed(seed: int, tokens: int, low: int = 128, high: int = 512, tasks: Sequence[str] = ()) -> list[tuple[str, int]]:
    dice, found = random.Random(seed), []
    while sum(count for _, count in found) < tokens:
        found.append((dice.choice(tasks or ["code", "chat", "math", "edit", "rag", "creative"]), dice.randrange(low, high)))
    return found


def workloads(tokens: int, seed: int = 1) -> dict[str, Workload]:
    """A policy may be tuned on these."""
    flips = [(("easy", "creative")[turn % 2], 40) for turn in range(tokens // 40)]
    nano, cpu, gpu, cliff = MACHINES.values()
    return {
        "code, nano": Workload(nano, requests_of("code", tokens)),
        "chat, nano": Workload(nano, requests_of("chat", tokens)),
        "easy, nano": Workload(nano, requests_of("easy", tokens)),
        "code, 1B on a CPU": Workload(cpu, requests_of("code", tokens)),
        "code with a draft model, 8B on a GPU": Workload(gpu, requests_of("code", tokens), DRAFTERS),
        "edit, 8B on a GPU": Workload(gpu, requests_of("edit", tokens)),
        "mixed, nano": Workload(nano, mixed(seed, tokens)),
        "creative, nano": Workload(nano, requests_of("creative", tokens)),
        "creative, 1B on a CPU": Workload(cpu, requests_of("creative", tokens)),
        "break-even, nano": Workload(nano, requests_of("half", tokens)),
        "code, float32 cliff": Workload(cliff, requests_of("code", tokens)),
        "flips, nano": Workload(nano, flips, request=400),
    }


LAPTOP = [(1, 1), (2, 1.15), (4, 1.3), (8, 1.7), (16, 2.6), (32, 4.5), (64, 8.5)]
SERVER = [(1, 1), (8, 1.08), (16, 1.15), (32, 1.3), (64, 1.7), (128, 2.8), (256, 5.0)]
HELD_OUT_TASKS = {
    "dialogue": Task((0.50, 0.58, 0.66, 0.78, 0.84, 0.74), 0.05, 8, 0.30, 0.25, 0.34, 1.1, 0.3),
    "translation": Task((0.30, 0.42, 0.55, 0.70, 0.80, 0.88), 0.02, 5, 0.15, 0.15, 0.30, 1.2, -0.4),
    "report": Task((0.70, 0.74, 0.78, 0.82, 0.86, 0.62), 0.25, 16, 0.45, 0.40, 0.52, 0.8, 0.8),
    "poem": Task((0.10, 0.16, 0.22, 0.36, 0.50, 0.40), 0.01, 4, 0.12, 0.10, 0.15, 0.7, 1.4),
    "expensive": Task((0.50, 0.58, 0.66, 0.78, 0.84, 0.90, 0.60), 0.05, 8, 0.30, 0.25, 0.34, 1.1, 0.3),
    "blank": Task((0.55, 0.64, 0.70, 0.80, 0.88, 0.78), 0.04, 6, 0.25, 0.20, 0.36, 0.05, 1.0),
}
"""Acceptances of E4, E6, E8, E12, skip, and one more drafter that each workload names."""
WITH_LOOKAHEAD = (*SELF, "lookahead")


def held_out(tokens: int) -> dict[str, Workload]:
    """No policy is tuned on these: each differs from `workloads` in the acceptance process, the prices, or the machine."""
    laptop, server = Machine(LAPTOP, 0.04, 0.06), Machine(SERVER, 0.05, 0.03, 0.01)

    def slower(place: int) -> float:
        return (1.0, 2.2, 1.0, 0.6, 1.4)[place // 350 % 5]

    def longer(place: int) -> float:
        return 1.0 + 0.8 * (place > tokens / 3)

    def work(machine: Machine, phases: list[tuple[str, int]], **more: object) -> Workload:
        return Workload(machine, phases, tasks=HELD_OUT_TASKS, **more)  # type: ignore[arg-type]

    def machine(points: list[tuple[int, float]], **more: object) -> Machine:
        return Machine(points, 0.05, 0.03, 0.01, **more)  # type: ignore[arg-type]

    some = mixed(5, tokens, 100, 600, ["dialogue", "translation", "report", "poem"])
    return {
        "bursts, laptop": work(laptop, requests_of("dialogue", tokens), process=Process(1.2, 0.8, 60, 1.3)),
        "large draft model, server": work(
            machine(SERVER, draft_model=0.45), requests_of("translation", tokens), drafters=("E8", "E12", "draft model")
        ),
        "drafters of 20 plain steps, server": work(
            machine(SERVER, draft_model=20.0, schedules={"lookahead": (6, 20.0)}),
            requests_of("expensive", tokens),
            drafters=("E6", "draft model", "lookahead"),
            known=(*DRAFTERS, "lookahead"),
        ),
        "batch of 4, server": work(machine(SERVER, rows=4), some),
        "batch of 16, server": work(machine(SERVER, rows=16), requests_of("report", tokens)),
        "slower and faster, server": work(server, some, slowdown=slower),
        "compiles, server": work(server, some, compile_time=15.0),
        "confidence says nothing, laptop": work(laptop, requests_of("blank", tokens)),
        "phases that change, server": work(
            server,
            [("translation", 700), ("report", 700)] * (tokens // 1400),
            drafters=("E4", "E8", "draft model"),
            request=350,
        ),
        "short requests, laptop": work(laptop, mixed(7, tokens, 40, 120, ["dialogue", "report", "poem"])),
        "own schedule, server": work(
            machine(SERVER, schedules={"lookahead": (5, 1.35)}),
            requests_of("dialogue", tokens),
            drafters=("E8", "lookahead"),
            known=WITH_LOOKAHEAD,
        ),
        "draft steps become longer, server": work(server, requests_of("report", tokens), drift=longer),
        "nothing pays, laptop": work(laptop, requests_of("poem", tokens)),
    }
