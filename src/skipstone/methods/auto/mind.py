"""What `auto` knows of a model across requests, and what it adds up within a plan."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

from skipstone.control import learning
from skipstone.control.costs import Cost, Costs, Line, Scoring, typical
from skipstone.control.ledger import Ledger
from skipstone.control.record import Log
from skipstone.control.state import PLAIN, PROBE, Done, Judged, Pace, Plan, Ranks, Rules, State
from skipstone.control.state import Drafter as Known
from skipstone.methods.auto.drafters import Candidate
from skipstone.methods.recycle import AdjacencyMatrix
from skipstone.utils.limits import SMALL_STATE_BYTES

RECENT_PLAIN = 64
"""Plain steps whose times are kept for the interval that is told."""
AWAKE, ASLEEP, MOST_ASLEEP = 128, 384, 3072
"""Steps for which texts are looked up, or continuations kept, although that does not pay, and for which not, in turn: each time
for twice as many, up to the last one."""
LEARNT_AT_ONCE = 4
"""Plans that are learnt from together: between two model passes learning takes long."""
LATEST_LEARNT, PAUSE = 9, 4.0
"""Times that learning took, and the multiple of the longest of these that it is thought to take at most: what took longer was
interrupted, by a garbage collection say, and that tells nothing of a drafter."""
NEW_TEXT = 32
"""Steps for which a new text is looked up, as long as a match of the latest NEW_TEXT_TRIED foretold REPEATED tokens."""
NEW_TEXT_TRIED, REPEATED = 8, 2
FIRST_GAIN, LEARNT_A_STEP = 0.5, 0.02
"""Plain steps that looking up is thought to gain a step at first, and the share by which one step moves the belief."""


@dataclass
class Shift:
    """Whether to do what takes some of the host's time in every step: while it pays, and else for AWAKE steps now and then.
    until: the step from which on it rests, for `asleep` steps. wanted_until: that up to which it is done in any case, for a
    new text; most_wanted: that up to which this may be put off."""

    until: int = AWAKE
    asleep: int = ASLEEP
    wanted_until: int = 0
    most_wanted: int = 0

    def begin(self, step: int) -> None:
        """A text begins."""
        self.wanted_until, self.most_wanted = step + NEW_TEXT_TRIED, step + NEW_TEXT

    def repeats(self, step: int) -> None:
        """A text repeats what stands before."""
        self.wanted_until = max(self.wanted_until, min(step + NEW_TEXT_TRIED, self.most_wanted))

    def goes_on(self, step: int, pays: bool) -> bool:
        """Asked once a step."""
        if pays:
            self.until, self.asleep = step + AWAKE, ASLEEP
        elif step >= self.until + self.asleep:
            self.until, self.asleep = step + AWAKE, min(2 * self.asleep, MOST_ASLEEP)
        return step < max(self.until, self.wanted_until)


@dataclass
class Worth:
    """What looking up has come to, a step, in plain steps: gain beside the drafter that drafts else, and what finding,
    deciding and judging took of the host's time."""

    gain: float = FIRST_GAIN
    spent: float = 0.0

    def add(self, gain: float, spent: float) -> None:
        """One more step in which texts were looked up."""
        self.gain += (gain - self.gain) * LEARNT_A_STEP
        self.spent += (spent - self.spent) * LEARNT_A_STEP

    @property
    def pays(self) -> bool:
        """Whether it was worth its time."""
        return self.gain > self.spent


@dataclass
class Mind:
    """What is known across requests. states: by the number of rows that decode, as that changes what steps take. live: that
    number now. kept: of recycled tokens. looking, keeping: whether texts are looked up, and continuations kept. looking_worth:
    what looking up comes to."""

    states: dict[int, State] = field(default_factory=dict)
    live: int = 1
    kept: AdjacencyMatrix = field(default_factory=AdjacencyMatrix)
    looking: Shift = field(default_factory=Shift)
    looking_worth: Worth = field(default_factory=Worth)
    keeping: Shift = field(default_factory=Shift)
    steps: int = 0
    kinds: dict[str, int] = field(default_factory=dict)
    log: Log | None = None
    learning_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=LATEST_LEARNT))
    plain_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_PLAIN))
    _taken: list["Taken"] = field(default_factory=list)  # what was not learnt from yet

    @property
    def nbytes(self) -> int:
        return self.kept.nbytes + (1 + len(self.states)) * SMALL_STATE_BYTES

    @property
    def state(self) -> State | None:
        """Of the rows that decode now; None before the first plain step of all."""
        return self.states.get(self.live)

    @state.setter
    def state(self, state: State) -> None:
        self.states[self.live] = state

    @property
    def behind(self) -> int:
        """Plans that the state knows nothing of yet."""
        return len(self._taken)

    def took(self, taken: "Taken") -> None:
        """A plan was carried out. What was plain or is urgent, or was to measure something, is learnt from at once."""
        self._taken.append(taken)
        plan, state = taken.plan, self.state
        assert state is not None
        if plan.kind in (PLAIN, PROBE) or plan.trial or self.behind >= LEARNT_AT_ONCE or learning.is_urgent(state, taken.done):
            self.learn()

    def learn(self) -> None:
        """From all that was done up to now."""
        state, self._taken, waiting = self.state, [], self._taken
        for one in waiting:
            assert state is not None
            if self.log is not None:
                self.log.step(self.live, one.matches, one.planned, one.plan, one.done, one.behind)
            state = learning.observe(state, one.plan, one.done)
        if state is not None:
            self.state = state

    def uninterrupted(self, seconds: float) -> float:
        """That learning took, without what interrupted it."""
        latest = self.learning_seconds
        most = PAUSE * max(latest) if len(latest) == LATEST_LEARNT else seconds
        latest.append(seconds)
        return min(seconds, most)

    def begin(self) -> None:
        """A request begins where none decodes."""
        self.states = {live: learning.begin(state) for live, state in self.states.items()}
        if self.log is not None:
            self.log.begin()

    def resize(self, live: int) -> None:
        """So many rows decode now. What may be lost is lost once: the accounts go with them."""
        if live != self.live:
            self.learn()
        before, changed = self.state, live != self.live
        self.live = live
        if not self.states or (live in self.states and not changed):
            return
        if live not in self.states:
            nearest = min(self.states, key=lambda rows: max(rows, live) / min(rows, live))
            self.states[live] = learning.resized(self.states[nearest], live)
        if before is not None:
            known = self.states[live]
            accounts = {"ledger": before.ledger, "shadow_account": before.shadow_account}
            self.state = replace(known, **accounts, pace=Pace(), steady=None)
        if self.log is not None:
            self.log.state(live, self.states[live])

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        if self.state is None:
            return {}
        costs = self.state.costs
        plain = costs.plain.value
        low, high = interval(self.plain_seconds or [plain])
        return {
            "steps": self.steps,
            "kinds": self.kinds,
            "current": self.state.current,
            "rates": self.state.rates(),
            "plain_seconds": plain,
            "plain_interval": (min(low, plain), max(high, plain)),  # the belief follows the latest ones
            "draft_steps": {name: cost.step for name, cost in costs.drafts.items()},
            "draft_setups": {name: cost.start for name, cost in costs.drafts.items()},
            "scoring": {n: costs.scoring(n) for n in (2, 4, 8, 16)},
            "debt": self.state.ledger.overall.debt,
        }


@dataclass(slots=True)
class Taken:
    """A plan that was carried out. matches: that it was decided with. planned: what was decided, None where there was nothing
    to decide; plan: what became of it. behind: as in `Mind`, when it was decided."""

    matches: Sequence[int]
    planned: Plan | None
    plan: Plan
    done: Done
    behind: int


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Where the median of what such values are drawn from lies, by their order, in at least 95 of 100 cases; of fewer than six
    values the least and the largest."""
    ordered, count = sorted(values), len(values)
    far = int(count / 2 - 0.98 * count**0.5) if count >= 6 else 0
    return ordered[max(far, 0)], ordered[min(count - 1 - far, count - 1)]


@dataclass(slots=True)
class Tally:
    """The steps of one plan, added up. close: the one that is looked at closely, the first that drafted, or of a trial the
    last, as those before it find caches that something else has filled. warm_seconds: of each of the steps that `Done.warm` is
    of. confidences: of the steps that were judged. The other fields as in `Done`."""

    close: Done | None = None
    tokens: float = 0.0
    seconds: float = 0.0
    steps: int = 0
    busy: tuple[int, float] = (0, 0.0)
    slowest: float | None = None
    verified: int = 0
    passes: int = 0
    aside_seconds: float = 0.0
    learning_seconds: float = 0.0
    matches: list[Judged] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    warm_seconds: list[float] = field(default_factory=list)
    confidences: list[tuple[float, bool]] = field(default_factory=list)
    behind_prompt: bool = False
    preparing: bool = False

    def plain(self, tokens: float, seconds: float, rests: bool, warm: bool, behind_prompt: bool) -> None:
        """One more plain step: between the shortest ones there are, nothing else is made of it. rests, warm, behind_prompt: of
        this step, as in `Done`."""
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1
        if not rests:
            self.busy = self.busy[0] + 1, self.busy[1] + seconds
        elif warm:
            self.warm_seconds.append(seconds)
        elif behind_prompt:
            self.behind_prompt = True

    def add(self, step: Done, trial: bool = False) -> None:
        """One more step that drafted."""
        other = step
        if self.close is None or trial:
            self.close, other = step, self.close
        if other is not None:
            self.verified += other.verified
            self.passes += other.passes
        self.tokens += step.tokens
        self.seconds += step.seconds
        self.steps += 1
        self.aside_seconds += step.aside_seconds
        self.learning_seconds += step.learning_seconds
        if step.slowest is not None:
            self.slowest = (self.slowest or 0.0) + step.slowest
        self.matches += step.matches
        self.ranks += step.ranks
        self.confidences += step.confidences
        self.preparing |= step.preparing

    @property
    def nearer(self) -> float:
        """As in `Done`."""
        return self.tokens if self.slowest is None else self.slowest

    def done(self) -> Done:
        """All of them."""
        close = self.close
        if close is None:
            return self._plain()
        if self.steps == 1:
            return close
        return Done(
            self.tokens,
            self.seconds,
            self.confidences,
            close.verified,
            close.passes,
            close.drafting,
            close.scoring,
            self.matches,
            self.ranks,
            self.aside_seconds,
            self.learning_seconds,
            self.steps,
            self.busy,
            self.slowest,
            self.verified,
            self.passes,
            preparing=self.preparing,
        )

    def _plain(self) -> Done:
        """All of them, where none drafted."""
        return Done(
            self.tokens,
            self.seconds,
            matches=self.matches,
            ranks=self.ranks,
            aside_seconds=self.aside_seconds,
            steps=self.steps,
            busy=self.busy,
            warm=(len(self.warm_seconds), typical(self.warm_seconds)),
            warm_median=median_low(self.warm_seconds) if self.warm_seconds else None,
            behind_prompt=self.behind_prompt,
        )


def first_state(
    seconds: float, live: int, drafters: Mapping[str, Candidate], rules: Rules, ledger: Ledger, recycles: bool
) -> State:
    """What is known before anything was: guesses. seconds: that a plain step took. live: rows that decode."""
    costs = Costs(
        plain=Cost(seconds, 1),
        scoring=Scoring().among(live),
        fixed=0.0,
        drafts={name: Line(one.guess) for name, one in drafters.items() if not one.own_rule},
        wholes={name: Cost(one.guess) for name, one in drafters.items() if one.own_rule},
        shadows={name: Cost(1.5 * one.shadow_guess) for name, one in drafters.items() if not one.own_rule},
    )
    known = {name: Known(own_rule=one.own_rule, searches=one.searches) for name, one in drafters.items()}
    return State(costs, known, rules, ledger, ranks=Ranks() if recycles else None, rows=live)
