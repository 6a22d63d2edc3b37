"""What decisions rest on, and what they are made of: frozen, so that every decision can be made again.

Times are in plain steps unless a name says seconds. Positions count the committed tokens of a session, of a batch the mean of
its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import NamedTuple

from skipstone.control.calibrate import Logistic, Matches
from skipstone.control.costs import BELIEVED_AFTER, Costs
from skipstone.control.ledger import Ledger
from skipstone.control.price import RankTree

PLAIN, PROBE, LOOKUP, RECYCLE = "plain", "probe", "lookup", "recycle"
"""What a step does that is no model's draft. A probe is a plain step that is taken to measure one."""

WARM_AFTER = 2
"""Plain steps behind anything else that are slower than others, as other weights stand in the caches."""
TRIAL_STEPS = 3
"""Steps of a trial that measures a drafter anew, of which the last one is looked at: they find other weights in the caches,
too."""
PROBE_STEPS = WARM_AFTER + BELIEVED_AFTER
"""Plain steps of a probe: the last ones are measured."""
NEVER_YET = -1000
"""The position of what has not happened: long before the first one."""
CHOSEN_EVERY = 16
"""Tokens between two choices among the drafters: what decides between them does not move faster."""
YOUNG = 3
"""Steps, virtual ones of shadows included, up to which next to nothing is known of a drafter."""
MOST_SAVED = 4.0
"""Plain steps that are saved for shadows at most."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The constants. half_life: tokens after which a step counts half in its drafter's rate, usual_half_life: in its usual
    rate. kept: share of the rate that a new request leaves. shadowing: share of the time that shadows may take; at first
    early_shadowing more, half of it after `early` tokens and ever less; calm_shadowing where nothing has moved for calm_after
    tokens. window: tokens that a shadow grades. plain_probing: share of the time that
    plain probes may lose, plain_spacing tokens apart. margin: by how much another drafter's rate must be larger to take over.
    most_drafts: a step. listening: tokens that are decoded plainly at first. look_again: tokens after which a drafter is graded
    whatever its rate is. prior: plain steps at its usual rate that a rate begins with, and at rate 1 that a usual rate begins
    with. most_nodes, depth: of a tree of recycled tokens."""

    half_life: float = 300.0
    usual_half_life: float = 4000.0
    kept: float = 0.5
    shadowing: float = 0.004
    early_shadowing: float = 0.01
    early: int = 500
    calm_shadowing: float = 0.0025
    calm_after: int = 1500
    window: int = 32
    plain_probing: float = 0.003
    plain_spacing: int = 128
    margin: float = 0.02
    most_drafts: int = 25
    listening: int = 16
    look_again: int = 1500
    prior: float = 8.0
    most_nodes: int = 63
    depth: int = 6


class Rate(NamedTuple):
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


EVEN = Rate(8.0, 8.0)
"""The spread of a batch before anything was seen: its end comes nearer by as many tokens as its rows write in the mean."""


class Rates(NamedTuple):
    """A drafter's rate now, and its usual one, which other requests have shown and which it has until the running one tells."""

    now: Rate = Rate()
    usual: Rate = Rate()

    def add(self, position: int, tokens: float, time: float, rules: "Rules", steps: int = 1) -> "Rates":
        """More steps at a position."""
        now = self.now.faded(position, rules.half_life).add(tokens, time, steps)
        return Rates(now, self.usual.faded(position, rules.usual_half_life).add(tokens, time, steps))

    def cut(self, keep: float) -> "Rates":
        """Another request begins."""
        return Rates(self.now.cut(keep), self.usual)

    def value(self, position: int, rules: "Rules") -> float:
        """Tokens a plain step."""
        prior, usual, now = rules.prior, self.usual, self.now
        keep = 0.5 ** ((position - usual.at) / rules.usual_half_life)
        expected = (usual.tokens * keep + prior) / (usual.time * keep + prior)
        keep = 0.5 ** ((position - now.at) / rules.half_life)
        return (now.tokens * keep + prior * expected) / (now.time * keep + prior)


@dataclass(frozen=True, slots=True)
class Drafter:
    """What is known of a drafter. seen: the position up to which it was graded. timed: that at which it was timed last. least:
    survivals that a draft needs to be gone on with, as `price.thresholds` has them at price 1, worked out at the position
    `least_at`. beside: the same for one row of several, whose draft steps others pay; none of a single row. own_rule: it stops
    by itself, and only its own steps tell what it is worth. searches: its shadows are also what its search learns from."""

    rate: Rates = Rates()
    calibration: Logistic = field(default_factory=Logistic)
    seen: int = 0
    timed: int = 0
    least: tuple[float, ...] = ()
    least_at: int = NEVER_YET
    beside: tuple[float, ...] = ()
    own_rule: bool = False
    searches: bool = False

    @property
    def unsure(self) -> bool:
        """Whether not even its first draft is worth its time."""
        return bool(self.least) and self.least[0] > 1

    def thresholds(self, worth: float) -> tuple[float, ...]:
        """The survivals where a plain step is worth so many tokens. Whether to draft at all is held against a plain step alone:
        on a hard passage even a drafter that is far from its usual rate may be faster than that."""
        return (*self.least[:1], *[one * worth for one in self.least[1:]])


@dataclass(frozen=True, slots=True)
class Ranks:
    """How often the token that was kept first, second, ... for a token followed it, and the tree that is drafted by that.
    pending: ranks of committed tokens that the tree was not graded on yet."""

    hits: tuple[float, ...] = (8.0, 3.0, 2.0, 1.0, 0.6)
    count: float = 20.0
    tree: RankTree | None = None
    tree_at: int = NEVER_YET
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
        pending = (*self.pending, *ranks)[-MOST_PENDING:]
        return Ranks(tuple(hits), count, self.tree, self.tree_at, self.rate, pending)

    def drawn(self, tree: RankTree, position: int) -> "Ranks":
        """With another tree."""
        return replace(self, tree=tree if tree.parents else None, tree_at=position)

    def graded(self, position: int, costs: Costs, rules: Rules) -> "Ranks":
        """The tree decodes the pending tokens virtually."""
        if self.tree is None:
            return self
        if len(self.pending) <= rules.depth + 1:
            return self
        rate, pending, below = self.rate, self.pending, _children(self.tree)
        time = costs.scoring(len(self.tree.parents) + 1) + costs.fixed + costs.lookup
        while len(pending) > rules.depth + 1:
            node, accepted = -1, 0
            while (node := below.get((node, pending[accepted]), -2)) >= 0:
                accepted += 1
            rate, pending = rate.add(position, accepted + 1, time, rules), pending[accepted + 1 :]
        return replace(self, rate=rate, pending=pending)


@lru_cache(maxsize=8)
def _children(tree: RankTree) -> dict[tuple[int, int], int]:
    """(node, rank) -> the node below it; -1 is the last committed token."""
    return {key: node for node, key in enumerate(zip(tree.parents, tree.ranks, strict=True))}


KEPT_RANKS = 0.998
"""Of a count of ranks, by a token."""
MOST_PENDING = 64
"""Ranks that wait to be graded."""


class Pace(NamedTuple):
    """How the machine keeps pace with what is believed of it. factors: of the latest plans, time that they took over time that
    they were thought to take. watched_from: the position from which on they tell."""

    factors: tuple[float, ...] = ()
    watched_from: int = 0

    def add(self, taken: float, expected: float) -> "Pace":
        """One more plan."""
        return Pace((*self.factors, taken / expected)[-PACE_PLANS:], self.watched_from)

    @property
    def factor(self) -> float:
        """By how much all takes longer than was thought, the median, which a few stalls leave as it is; 1 where too little is
        known."""
        return sorted(self.factors)[PACE_PLANS // 2] if len(self.factors) == PACE_PLANS else 1.0

    @property
    def steady(self) -> bool:
        """Whether the latest plan, too, took about what was thought."""
        latest = self.factors[-1] if self.factors else 1.0
        return all(1 / STEADY_PACE < one < STEADY_PACE for one in (latest, self.factor))

    @property
    def changed(self) -> bool:
        """Whether that is more than steps differ by themselves."""
        return not 1 / CHANGED_PACE < self.factor < CHANGED_PACE


PACE_PLANS = 3
"""Plans that tell of the pace."""
STEADY_PACE = 1.1
"""Factor up to which the pace is what is believed."""
CHANGED_PACE = 1.25
"""Factor from which on a change of the pace is no chance."""


class Steady(NamedTuple):
    """What was known when the machine last kept the pace that is believed. position: at which that was."""

    costs: Costs
    ledger: Ledger
    position: int


@dataclass(frozen=True, slots=True)
class State:
    """All that a session's decisions rest on. rows: that decode. current: the drafter that drafts, where nothing else does.
    position: committed tokens. Positions: moved_at at which the drafter changed, chosen_at at which drafters were held against
    each other, scored at which scoring what is looked up or recycled was timed, probed_at at which a plain step was measured,
    stalled_at of the latest step that took far longer than was thought. shadow_account, probe_account: plain steps that may be
    spent. pace: of the steps since a plain one was measured. steady: from before it changed, None where nothing is known of
    that. spread: of steps that drafted for a batch, the tokens of all rows in the mean, and as "time" those by which the end of
    the batch came nearer."""

    costs: Costs
    drafters: Mapping[str, Drafter]
    rules: Rules = Rules()
    ledger: Ledger = field(default_factory=Ledger)
    matches: Matches = field(default_factory=Matches)
    lookups: Rate = Rate(24.0, 10.0)
    ranks: Ranks | None = None
    rows: int = 1
    current: str | None = None
    position: int = 0
    moved_at: int = 0
    chosen_at: int = NEVER_YET
    scored: int = 0
    probed_at: int = 0
    stalled_at: int = NEVER_YET
    shadow_account: float = 3.0
    probe_account: float = 1.0  # the first steps of all are measured on a cold machine: once more soon
    pace: Pace = Pace()
    steady: Steady | None = None
    spread: Rate = EVEN

    def rate(self, name: str) -> float:
        """Of a drafter, in tokens a plain step."""
        own = self.ranks.rate if name == RECYCLE and self.ranks else self.drafters[name].rate
        return own.value(self.position, self.rules)

    @property
    def chooses(self) -> bool:
        """Whether the drafters are held against each other before the next step."""
        treeless = self.current == RECYCLE and (self.ranks is None or self.ranks.tree is None)
        return treeless or not 0 <= self.position - self.chosen_at < CHOSEN_EVERY

    @property
    def any_young(self) -> bool:
        """Whether next to nothing is known of a drafter."""
        return any(one.rate.usual.steps < YOUNG and not one.own_rule for one in self.drafters.values())

    @property
    def cheapest_shadow(self) -> float:
        """What has to be saved before any shadow can be paid."""
        return min([MOST_SAVED, *(cost.value for cost in self.costs.shadows.values())])

    def windows(self, tokens: int) -> float:
        """How many windows so many tokens are, one at least."""
        return max(tokens / self.rules.window, 1.0)

    def rates(self) -> dict[str, float]:
        """Of all drafters that could draft now."""
        found = {name: self.rate(name) for name in self.drafters}
        if self.ranks is not None and self.ranks.tree is not None:
            found[RECYCLE] = self.rate(RECYCLE)
        return found


@dataclass(frozen=True, slots=True)
class Plan:
    """What a step does, and why. kind: PLAIN, PROBE, LOOKUP, RECYCLE or the name of a drafter. price: tokens that a plain step
    is worth. current: the drafter that the step was weighed against. thresholds, beside: of a drafter. drafts: of a lookup, one
    number a row. tree: of recycled tokens. trial: the drafter drafts to have its draft step timed, and the account of shadows
    pays. steps: that it stands for, as long as no lookup is worth more."""

    kind: str
    price: float
    current: str | None
    reason: str
    thresholds: tuple[float, ...] = ()
    drafts: tuple[int, ...] = ()
    tree: RankTree | None = None
    trial: bool = False
    steps: int = 1
    beside: tuple[float, ...] = ()


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
    of it. steps: of one plan, of which these and what follows are the sum; one is looked at closely, the first, or of a trial
    the last. matches: of every row that had one. ranks: of every committed token of one row, its place among those that were
    kept for the one before it, beyond all for one that was not. aside_seconds: spent before the steps beside decoding, on
    shadows, and on learning before plain ones. learning_seconds: spent on learning before steps that drafted, and part of
    `seconds`. busy: plain steps in which something was looked up or kept, and their seconds; all others took what plain
    decoding takes. slowest: tokens of the row that has most to write yet, which a batch ends with; None where that is `tokens`.
    more_verified, more_passes: of all steps but that one. warm: of other plain steps, how many stood behind WARM_AFTER
    others, and what one of these took (`costs.typical`); None where that is all of them. warm_median: their lower median, which
    one slow step among two does not move; None where nobody knows. behind_prompt: whether those that were not warm stood behind
    a prompt, as plain decoding's do. preparing: whether the engine compiled or recorded something in a step that drafted, whose
    time says nothing of later ones. confidences: of a drafter's tokens that were judged, each with whether it was accepted; of
    one step, or of all steps of a trial.

    Of that step: verified, drafts that were scored. passes: draft steps of a drafter without a rule of its own. drafting,
    scoring: seconds of these, and of the rest of the step; None where they were not measured."""

    tokens: float
    seconds: float
    confidences: Sequence[tuple[float, bool]] = ()
    verified: int = 0
    passes: int = 0
    drafting: float | None = None
    scoring: float | None = None
    matches: Sequence[Judged] = ()
    ranks: Sequence[int] = ()
    aside_seconds: float = 0.0
    learning_seconds: float = 0.0
    steps: int = 1
    busy: tuple[int, float] = (0, 0.0)
    slowest: float | None = None
    more_verified: int = 0
    more_passes: int = 0
    warm: tuple[int, float] | None = None
    behind_prompt: bool = False
    preparing: bool = False
    warm_median: float | None = None

    @property
    def nearer(self) -> float:
        """Tokens by which the end has come nearer."""
        return self.tokens if self.slowest is None else self.slowest
