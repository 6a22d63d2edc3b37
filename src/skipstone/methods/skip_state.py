"""What SWIFT knows about a model across requests: the search, what passes cost here, and whether drafting pays.

All costs are in plain steps: those of steps by the clock, over what plain steps took; those of single passes, which the search
needs, were timed once. What is not known to pay (drafts of a new layer set, evaluations, timings) is paid from a slack
that plain decoding and good drafts build up: what is tried costs at most an allowance, a share of the plain steps that the
tokens would have taken, and START plain steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any

from skipstone.core.model import LayeredModel
from skipstone.core.skipping import SkipSet
from skipstone.core.types import Draft, RowVerdict
from skipstone.methods.layer_sets import MOST_DRAFTS, Objective, Space, Z, best_length
from skipstone.methods.leaves import MOST_LEAVES, RANKS
from skipstone.methods.skip_costs import Timings, by_weight
from skipstone.methods.skip_search import SEARCHES, Cusum, FixedSearch, Search

if TYPE_CHECKING:
    from skipstone.methods.swift import Swift, SwiftSession

SEARCHING, SETTLED = 0.08, 0.02
"""Share of time that may be lost while the search goes on, and after it."""
START, MOST_SLACK, SEARCH_BUDGET = 8.0, 64.0, 800.0
"""Plain steps: what a model may lose at first, most slack that is kept, and most that a guarded search may cost."""
PAYS, LOSES, LEAST_STEPS, RECENT = 1.02, 0.98, 8, 64
"""A layer set must bring so much to be drafted with, and is given up when it brings so little, by the latest steps with it;
before there are so many, it is on trial, in turns with evaluations."""
TRIAL, HOPE = 3, 0.8
"""Most drafts of a step on trial, and the matchness that is hoped for where nothing was judged."""
BETTER, EVALUATIONS = 1.01, 4
"""Another set must be better by so much to take a set's place; none is good enough before so many evaluations."""
ALPHA_STEPS, ALPHA_LEAST, RATIO_STEP, LEAST_RATIO, MORE_STEPS = 256, 0.7, 0.05, 0.2, 64
"""The skip ratio goes down where alpha over so many draft steps is too low; then the search goes on for some steps."""
PLAIN, REFRESH, SPIKE = 16, 64, 3.0
"""Plain steps that are remembered; one of so many steps is one, where drafting pays. What takes so many times what was expected
was something else's doing, and counts as so much."""
LEAVES = 0.1
"""Plain steps that the runners-up of a step may cost."""
KEPT = 500
"""Points of the history."""


class SkipState:
    """See the module. z, skip: the layer set to draft with. profile: a set that was found before; nothing is searched then.
    rows: of the batch."""

    def __init__(self, method: Swift, model: LayeredModel, profile: SkipSet | None = None, rows: int = 1) -> None:
        self.method, self.space = method, Space(model.depth)
        self.lock = threading.RLock()
        self.costs = by_weight(model, self.space)
        self.timings: Timings | None = Timings(self.space) if method.guard or method.objective == "speed" else None
        self.judging = -(-method.context_window // rows)  # tokens of a pass of all rows that is as large as a judging one
        objective = Objective(self.costs, method.objective, min(method.num_speculative_tokens, MOST_DRAFTS))
        if profile is None:
            self.ratio, count = method.skip_ratio, self.space.count(method.skip_ratio)
            self.search: Search = SEARCHES[method.search](self.space, count, objective, method.search_seed)
        else:
            self.search = FixedSearch(self.space, self.space.from_skip_set(profile))
            self.ratio = self.search.count / self.space.size
        self.cusum, self.trial_next = Cusum(), False
        self.slack, self.tokens = START, 0.0
        self.spent = {"draft": 0.0, "score": 0.0, "search": 0.0, "timing": 0.0}
        self.this_search = 0.0
        self.evaluations = self.since_better = self.steps = self.drafted_steps = 0
        self.adaptive = self.search.adaptive and method.max_steps > 0
        self.searching, self.left = self.adaptive, method.max_steps
        self.alphas: deque[tuple[int, int]] = deque()
        self.plain: deque[float] = deque(maxlen=PLAIN)
        self.history: deque[dict[str, Any]] = deque(maxlen=KEPT)
        self.paid = 0
        self._take(self.search.best())

    # ------------------------------------------------------------------------------------------ what to do

    @property
    def allowance(self) -> float:
        """Share of time that may be lost now."""
        return SEARCHING if self.searching else SETTLED

    def due(self, session: SwiftSession | None) -> Z | None:
        """A layer set to judge now; None where there is nothing to judge, or no slack for it."""
        with self.lock:
            if self.timings is not None:
                assert session is not None
                if not self.method.guard or self.slack > min(self.timings.estimate(self.costs), MOST_SLACK / 2):
                    self._time(session)
                return None
            cost = self.costs.draft(self.z) * self.costs.score(self.judging)
            turn = self.trial_next and len(self.recent) < LEAST_STEPS and self.pays()
            if not self.searching or (self.method.guard and (turn or self.slack < min(cost, MOST_SLACK / 2))):
                return None
            self._lose("search", cost)
            self.this_search += cost
            return self.search.propose()

    def room(self, most: int) -> int:
        """How many drafts the next step may make, 0 to `most`: all where drafting pays. What may pay is tried, with chains of
        the length that should pay most, as the slack allows; what does not only after the search, which needs the slack."""
        with self.lock:
            known = len(self.recent) >= LEAST_STEPS
            if not self.method.guard:
                return most
            if known and self.pays():
                return most if self.steps % REFRESH else 0
            if self.timings is not None or (self.searching and (known or not self.pays())):
                return 0
            c = self.costs.draft(self.z)
            drafts = min(most, TRIAL, best_length(HOPE if self.matchness is None else self.matchness, c, self.costs))
            cost = drafts * c + self.costs.score(1 + drafts + self.leaves(drafts)) - 1
            return drafts if cost <= self.slack else 0

    def leaves(self, drafts: int) -> int:
        """How many runners-up a step of so many drafts may verify."""
        if not self.method.dynamic_verification:
            return 0
        most = min((RANKS - 1) * drafts, MOST_LEAVES)
        if not self.method.guard:
            return most
        allowed = self.costs.score(1 + drafts) + LEAVES
        return max((n for n in range(most + 1) if self.costs.score(1 + drafts + n) <= allowed), default=0)

    def pays(self, least: float = PAYS) -> bool:
        """Whether the layer set brings at least so much, by its latest steps and what its matchness promises, which counts as
        much as LEAST_STEPS steps."""
        tokens, cost = (sum(column) for column in zip(*self.recent, strict=True)) if self.recent else (0.0, 0.0)
        if self.matchness is not None:
            weight = LEAST_STEPS * (cost / len(self.recent) if self.recent else 1.0)
            tokens += weight * self.search.objective.speedup(self.matchness, self.z)
            cost += weight
        return cost > 0 and tokens > least * cost

    # ----------------------------------------------------------------------------------------- what is learnt

    def learn(self, draft: Draft, verdicts: list[RowVerdict], seconds: float | None = None) -> None:
        """Take over what became of a step. seconds: that it took; without, it cost what its passes are thought to."""
        live = [verdict for verdict in verdicts if verdict.tokens]
        passes = (draft.width if draft.levels is None else draft.levels) if any(one.draft_steps for one in live) else 0
        with self.lock:
            tokens = sum(len(verdict.tokens) for verdict in live) / max(len(live), 1)
            c, v = passes * self.costs.draft(self.z), self.costs.score(draft.width + 1)
            factor = self._clocked(c + v, seconds, plain=not passes)
            self.tokens += tokens
            self.spent["draft"] += factor * c
            self.spent["score"] += factor * v
            self.slack = min(self.slack + (1 + self.allowance) * tokens - factor * (c + v), MOST_SLACK)
            self.steps += 1
            if passes:
                self.drafted_steps += 1
                self.trial_next = False
                self.recent.append((tokens, factor * (c + v)))
                self._follow(sum(len(one.path) for one in live), sum(one.draft_steps for one in live))

    def _clocked(self, expected: float, seconds: float | None, plain: bool) -> float:
        """By the clock, how many times what was expected a step cost."""
        if seconds is None:
            return 1.0
        if plain:
            self.plain.append(min(seconds, SPIKE * median(self.plain)) if self.plain else seconds)
            return 1.0
        return min(seconds / median(self.plain) / expected, SPIKE) if self.plain else 1.0

    def _follow(self, accepted: int, drafted: int) -> None:
        """The skip ratio goes down where few drafts are accepted; a changed task, or a set that no longer pays, starts the
        search again."""
        if self.searching or not self.adaptive:
            return
        changed = self.cusum.add(accepted / max(drafted, 1))
        pays = self.pays(LOSES)
        if changed or (not pays and self.paid >= RECENT):
            self.search.widen()
            self._again(self.method.max_steps)
            return
        self.paid = self.paid + 1 if pays else 0
        self.alphas.append((accepted, drafted))
        total = sum(count for _, count in self.alphas)
        if total < ALPHA_STEPS:
            return
        alpha = sum(count for count, _ in self.alphas) / total
        self.alphas.popleft()
        if self.method.adjust and alpha < ALPHA_LEAST and self.ratio > LEAST_RATIO:
            self.ratio = max(LEAST_RATIO, self.ratio - RATIO_STEP)
            self.search.resize(max(1, self.space.count(self.ratio)))
            self._again(MORE_STEPS)

    def judged(self, z: Z, matchness: float, positions: int) -> None:
        """One evaluation (Eq. 4): the search learns, and the best set is drafted with."""
        with self.lock:
            self.search.observe(z, matchness, positions)
            self.trial_next = True
            self.evaluations += 1
            self.since_better += 1
            self.left -= 1
            self._consider(self.search.best())
            tired = self.since_better >= self.method.patience
            dear = self.method.guard and self.this_search > SEARCH_BUDGET
            enough = self.evaluations >= EVALUATIONS and self.search.least(self.z) > self.method.enough
            if self.left <= 0 or tired or dear or enough:
                self.searching, self.paid = False, 0
                self.alphas.clear()

    def _consider(self, z: Z) -> None:
        """Change to a set that is clearly better than the one in use. Where that one pays, its latest steps speak for the
        other, until that has its own."""
        if (z != self.z).any() and self._worth(z) > BETTER * self._worth(self.z):
            self._take(z, list(self.recent)[-LEAST_STEPS:] if self.pays() else [])
            self.since_better = 0
        self.matchness = self.search.estimate(self.z)

    def _worth(self, z: Z) -> float:
        seen = self.search.estimate(z)
        return 0.0 if seen is None else self.search.objective(seen, z)

    def _take(self, z: Z, recent: Iterable[tuple[float, float]] = ()) -> None:
        """Draft with a set from now on. recent: steps that count as its own."""
        self.z, self.skip, self.matchness = z, self.space.to_skip_set(z), self.search.estimate(z)
        self.recent = deque(recent, maxlen=RECENT)
        self.history.append(
            {"evaluation": self.evaluations, "tokens": self.tokens, "matchness": self.matchness, **self._places()}
        )

    def _again(self, steps: int) -> None:
        """Search on."""
        self.searching, self.left, self.since_better, self.this_search = True, steps, 0, 0.0
        self.cusum = Cusum()
        self._take(self.search.best())

    # ------------------------------------------------------------------------------------- what there is to say

    def _places(self) -> dict[str, list[int]]:
        return {"attention": sorted(self.skip.attention), "mlp": sorted(self.skip.mlp)}

    def report(self) -> dict[str, Any]:
        """Plain JSON values. Costs are in plain steps, spent too."""
        with self.lock:
            return {
                "matchness": self.matchness,
                "skip_ratio": self.ratio,
                "skipped": self._places(),
                "evaluations": self.evaluations,
                "searching": self.searching,
                "pays": self.pays(),
                "timed": self.timings is None,
                "cost_of_a_draft": self.costs.draft(self.z),
                "cost_of_scoring": {str(tokens): self.costs.score(tokens) for tokens in (2, 4, 8, 16, 26)},
                "spent": dict(self.spent),
                "steps": self.steps,
                "drafted_steps": self.drafted_steps,
                "history": list(self.history),
            }

    def remark(self) -> str | None:
        """What a user should know: that no layer set pays here."""
        with self.lock:
            tried = self.timings is None and len(self.recent) >= LEAST_STEPS
            if self.searching or not tried or not self.method.guard or self.pays():
                return None
            seen = "" if self.matchness is None else f", its matchness is {self.matchness:.2f}"
            return (
                f"swift found no layer set that pays here and decodes plainly, but for trials: the best of {self.evaluations} "
                f"evaluations leaves out {int(self.z.sum())} of {self.space.size} sublayers{seen}, a draft costs "
                f"{self.costs.draft(self.z):.2f} plain steps and scoring 4 tokens {self.costs.score(4):.2f}"
            )

    # ---------------------------------------------------------------------------------------------- costs

    def _time(self, session: SwiftSession) -> None:
        assert self.timings is not None
        estimate = self.timings.estimate(self.costs)
        self._lose("timing", min(self.timings.next(session), SPIKE * estimate))  # a first pass may load kernels
        if (costs := self.timings.costs()) is not None:
            self.timings, self.costs = None, costs
            self.search.objective = replace(self.search.objective, costs=costs)
            self.recent.clear()

    def _lose(self, what: str, cost: float) -> None:
        self.spent[what] += cost
        self.slack -= cost
