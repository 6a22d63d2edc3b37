"""What SWIFT knows about a model across requests: the search, what passes cost here, and what drafting brought.

All costs are in plain steps: those of steps by the clock, over what plain steps took; those of single passes, which the search
needs, were timed once. First the uniform set is tried (with a guard), then passes are timed, then there is a search.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.methods.shared.guard import PROBE, SPIKE, START, Guard
from skipstone.methods.shared.layer_sets import MOST_DRAFTS, Costs, Objective, Space, Z
from skipstone.methods.swift import report as skip_report
from skipstone.methods.swift.cusum import Cusum
from skipstone.methods.swift.search import SEARCHES, FixedSearch, Search
from skipstone.methods.swift.timings import Timings, by_weight
from skipstone.methods.swift.tree import MOST_LEAVES, RANKS
from skipstone.models.layered import LayeredModel
from skipstone.models.skipping import SkipSet

if TYPE_CHECKING:
    from skipstone.methods.swift.swift import Swift, SwiftSession

SEARCHING, SETTLED = 0.04, 0.02
"""Share of time that may be lost while the search goes on, and after it."""
SEARCH_BUDGET, FIRST = 700.0, 4
"""Plain steps that a guarded search may cost at most; steps that draft before anything is timed."""
BETTER, EVALUATIONS = 1.01, 16
"""Another set must be better by so much to take a set's place; none is good enough before so many evaluations."""
ALPHA_STEPS, ALPHA_LEAST, MORE_STEPS = 256, 0.7, 64
"""The skip ratio goes down where alpha over so many draft steps is too low; then the search goes on for some steps."""
PAID, LOST = 1.1, 0.85
"""Where a layer set was worth so much and then is worth so little, by its latest steps, there is a new search."""
RATIO_STEP, LEAST_RATIO, MOST_RATIO, RESIZED = 0.05, 0.2, 0.8, 16
"""How far the skip ratio moves at once (one sublayer at least), in which bounds, and every how many evaluations."""
LEAVES = 0.1
"""Plain steps that the runners-up of a step may cost."""
KEPT = 500
"""Points of the history."""


class SkipState:
    """See the module. z, skip: the layer set to draft with; c: what a draft costs with it. profile: a set that was found
    before; nothing is searched then. rows: of the batch."""

    def __init__(self, method: Swift, model: LayeredModel, profile: SkipSet | None = None, rows: int = 1) -> None:
        self.method, self.space = method, Space(model.depth)
        self.lock = threading.RLock()
        self.costs = by_weight(model, self.space)
        self.most_leaves: dict[int, int] = {}  # by number of drafts
        self.judging = -(-method.context_window // rows)  # tokens of a pass of all rows that is as large as a judging one
        self.judged_at, self.charged = 1.0, 0.0  # what a judging pass lately took over what it should; what the last one was to
        leaves = MOST_LEAVES if method.dynamic_verification and not method.guard else 0  # a guard has no more than are timed
        widest = max(1 + method.num_speculative_tokens + leaves, self.judging)
        self.timings = Timings(self.space, widest) if method.guard or method.objective == "speed" else None
        objective = Objective(self.costs, method.objective, min(method.num_speculative_tokens, MOST_DRAFTS))
        if profile is None:
            count = self.space.count(method.skip_ratio)
            self.search: Search = SEARCHES[method.search](self.space, count, objective, method.search_seed)
        else:
            self.search = FixedSearch(self.space, self.space.from_skip_set(profile))
        self.cusum, self.judged_last, self.paid = Cusum(), False, False
        self.spent = {"draft": 0.0, "score": 0.0, "search": 0.0, "timing": 0.0}
        self.this_search, self.since = 0.0, 0.0
        self.evaluations = self.begun = self.since_better = self.steps = self.drafted_steps = 0
        self.adaptive = self.search.adaptive and method.max_steps > 0
        self.searching, self.left = self.adaptive, method.max_steps
        self.guard, self.tokens = Guard(SEARCHING if self.searching else SETTLED), 0.0
        self.alphas: deque[tuple[int, int]] = deque()
        self.history: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self._take(self.search.best())

    # ------------------------------------------------------------------------------------------ what to do

    def another_text(self) -> None:
        """A request begins."""
        with self.lock:
            self.guard.another_text()

    def due(self, session: SwiftSession | None, ready: bool = True) -> Z | None:
        """A layer set to judge now; None where there is nothing to judge, or no slack for it. ready: whether there is text to
        judge by; timings need none."""
        with self.lock:
            guarded = self.method.guard
            if self.timings is not None:
                assert session is not None
                tried = self.drafted_steps >= FIRST and self.guard.affords(self.timings.estimate(self.costs))
                if tried or not guarded:
                    self._time(session)
                return None
            cost = self._judging()
            waits = self.judged_last and self.guard.probes()  # in turns, or the one would leave no slack for the other
            if not self.searching or not ready or (guarded and (waits or not self._affordable(cost))):
                return None
            self._lose("search", cost)
            self.this_search, self.charged = self.this_search + cost, cost
            return self.search.propose()

    def _judging(self) -> float:
        """What a judging pass costs."""
        return self.judged_at * self.c * self.costs.score(self.judging)

    def took(self, seconds: float) -> None:
        """What the latest judging pass took, where somebody could look: more or less was lost than thought."""
        with self.lock:
            if not self.guard.plain or not self.charged:
                return
            factor = min(max(self.guard.in_plain(seconds) / self.charged, 1 / SPIKE), SPIKE)
            self._lose("search", more := (factor - 1) * self.charged)
            self.judged_at *= factor
            self.this_search += more

    def _affordable(self, cost: float) -> bool:
        """Whether a judging pass may be made: there is slack for it, and the search keeps to its share of the time, also where
        drafting pays and there is plenty."""
        return self.guard.affords(cost) and self.this_search + cost <= SEARCHING * (self.tokens - self.since) + START

    def room(self, most: int) -> int:
        """How many drafts the next step may make, 0 to `most`."""
        with self.lock:
            if not self.method.guard:
                return most
            most = min(most, self.method.num_speculative_tokens)
            drafts = min(most, PROBE)
            cost = drafts * self.c + self.costs.score(1 + drafts + self._leaves(drafts)) - 1
            return self.guard.room(most, cost)

    def leaves(self, drafts: int) -> tuple[int, float]:
        """(how many runners-up a step of so many drafts may verify, how likely one must be to be worth its cost: it brings a
        token)."""
        with self.lock:
            most, width = self._leaves(drafts), 1 + drafts  # a token may be worth more than a plain step: then a little low
            guarded = self.method.guard and most > 0
            return most, (self.costs.score(width + most) - self.costs.score(width)) / most if guarded else 0.0

    def _leaves(self, drafts: int) -> int:
        if not self.method.dynamic_verification:
            return 0
        most = min((RANKS - 1) * drafts, MOST_LEAVES)
        if not self.method.guard:
            return most
        if drafts not in self.most_leaves:
            allowed = self.costs.score(1 + drafts) + LEAVES
            most = min(most, max(len(self.costs.scoring) - 1 - drafts, 0))  # what a wider pass costs nobody knows
            kept = (n for n in range(most + 1) if self.costs.score(1 + drafts + n) <= allowed)
            self.most_leaves[drafts] = max(kept, default=0)
        return self.most_leaves[drafts]

    # ----------------------------------------------------------------------------------------- what is learnt

    def learn(self, draft: Draft, verdicts: list[RowVerdict], seconds: float | None = None) -> None:
        """Take over what became of a step. seconds: that it took; without, it cost what its passes are thought to."""
        live = [verdict for verdict in verdicts if verdict.tokens]
        passes = (draft.width if draft.levels is None else draft.levels) if any(one.draft_steps for one in live) else 0
        with self.lock:
            tokens = sum(len(verdict.tokens) for verdict in live) / max(len(live), 1)
            c, v = passes * self.c, self.costs.score(draft.width + 1)
            factor = self.guard.clocked(c + v, seconds, plain=not passes)
            self.tokens += tokens
            self.spent["draft"] += factor * c
            self.spent["score"] += factor * v
            self.steps += 1
            self.drafted_steps += passes > 0
            self.guard.learn(tokens, factor * (c + v), passes > 0)
            if passes:
                self.judged_last = False
                right = [sum(node < one.draft_steps for node in one.path) for one in live]  # runners-up come behind the chain
                drafted = [one.draft_steps for one in live]
                wrong = sum(fewer < most for fewer, most in zip(right, drafted, strict=True))
                self._follow(sum(right), sum(drafted), sum(right) + wrong)

    def _follow(self, accepted: int, drafted: int, judged: int) -> None:
        """A changed task starts the search again; the skip ratio goes down where few drafts are right. judged: right and wrong;
        the share of the right among those does not depend on how many were drafted."""
        if self.searching or not self.adaptive:
            return
        worth = self.guard.worth()
        self.paid = self.paid or (worth is not None and worth >= PAID)
        lost = self.paid and worth is not None and worth < LOST
        if self.cusum.add(accepted / max(judged, 1), max(judged, 1)) or lost:
            self.search.widen()
            self._again(self.method.max_steps)
            return
        self.alphas.append((accepted, drafted))
        total = sum(count for _, count in self.alphas)
        if total < ALPHA_STEPS:
            return
        alpha = sum(count for count, _ in self.alphas) / total
        self.alphas.popleft()
        fewer = min(self._sizes())
        low = self.method.adjust and alpha < ALPHA_LEAST and fewer < self.search.count
        if low and self.search.promise(fewer) >= self.search.promise(self.search.count):  # both 0 where it cannot tell
            self.search.resize(fewer)
            self._take(self.search.best())
            self._again(MORE_STEPS)

    def _sizes(self) -> list[int]:
        """How many sublayers may be left out after a change of the skip ratio: fewer, more."""
        size, now = self.space.size, self.search.count
        step, least, most = max(1, round(RATIO_STEP * size)), max(1, round(LEAST_RATIO * size)), round(MOST_RATIO * size)
        return [min(max(now - step, least), most), min(max(now + step, least), most)]

    def judged(self, z: Z, matchness: float, positions: int) -> None:
        """One evaluation (Eq. 4): the search learns, and the best set is drafted with."""
        with self.lock:
            self.search.observe(z, matchness, positions)
            self.judged_last = True
            self.evaluations += 1
            self.since_better += 1
            self.left -= 1
            unsettled = self._suit()
            self._consider(self.search.best())
            tired = self.since_better >= self.method.patience
            dear = self.method.guard and self.this_search > SEARCH_BUDGET
            enough = (
                self.evaluations - self.begun >= EVALUATIONS
                and self.search.least(self.z) > self.method.enough
                and not unsettled
            )
            if self.left <= 0 or tired or dear or enough:
                self.searching, self.guard.allowance, self.paid = False, SETTLED, False
                self.alphas.clear()

    def _suit(self) -> bool:
        """Move the skip ratio, now and then, to where the search expects more. Returns whether it expects more elsewhere."""
        if not self.method.adjust or self.method.objective != "speed":
            return False
        promised, count = max((self.search.promise(count), count) for count in self._sizes())
        if promised <= self.search.promise(self.search.count):
            return False
        if self.evaluations % RESIZED == 0:
            self.search.resize(count)
        return True

    def _consider(self, z: Z) -> None:
        """Change to a set that is clearly better than the one in use; one that pays is left only for one that is likely so."""
        hoped = self.search.objective(self.search.likely(z), z) if self.guard.pays() else self._worth(z)
        if (z != self.z).any() and hoped > BETTER * self._worth(self.z):
            self._take(z)
            self.since_better = 0
        self.matchness = self.search.estimate(self.z)

    def _worth(self, z: Z) -> float:
        seen = self.search.estimate(z)
        return 0.0 if seen is None else self.search.objective(seen, z)

    def _take(self, z: Z) -> None:
        """Draft with a set from now on. Where the last one pays, its steps speak for this one, until that has its own."""
        self.z, self.skip, self.matchness = z, self.space.to_skip_set(z), self.search.estimate(z)
        self.c = self.costs.draft(z)
        if not self.guard.pays():
            self.guard.another_set()
        self.history.append(
            {"evaluation": self.evaluations, "tokens": self.tokens, "matchness": self.matchness, **self.places()}
        )

    def _again(self, steps: int) -> None:
        """Search on."""
        self.searching, self.left, self.since_better, self.cusum = True, steps, 0, Cusum()
        self.begun, self.this_search, self.since, self.guard.allowance = self.evaluations, 0.0, self.tokens, SEARCHING

    # ------------------------------------------------------------------------------------- what there is to say

    def places(self) -> dict[str, list[int]]:
        """The sublayers that drafting leaves out."""
        return {"attention": sorted(self.skip.attention), "mlp": sorted(self.skip.mlp)}

    def report(self) -> dict[str, Any]:
        """Plain JSON values. Costs are in plain steps, spent too."""
        with self.lock:
            return skip_report.report(self)

    def remark(self) -> str | None:
        """What a user should know: that no layer set pays here."""
        with self.lock:
            return skip_report.remark(self)

    # ---------------------------------------------------------------------------------------------- costs

    def _time(self, session: SwiftSession) -> None:
        assert self.timings is not None
        estimate = self.timings.estimate(self.costs)
        self._lose("timing", min(self.timings.next(session), SPIKE * estimate))  # a first pass may load kernels
        if (costs := self.timings.costs()) is not None:
            self.timings = None
            self.price(costs)

    def price(self, costs: Costs) -> None:
        """Take over what passes cost."""
        self.costs, self.c = costs, costs.draft(self.z)
        self.most_leaves.clear()
        self.search.objective = replace(self.search.objective, costs=costs)

    def _lose(self, what: str, cost: float) -> None:
        self.spent[what] += cost
        self.guard.lose(cost)
