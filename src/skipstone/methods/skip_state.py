"""What SWIFT knows about a model across requests: the search, what passes cost here, and whether drafting pays.

All costs are in plain steps. What is not known to pay (trials of a layer set, evaluations, timings) is paid from a slack that
plain decoding and good drafts build up: over any stretch the tokens are at least 1 / (1 + allowance) of what plain decoding
gives in the same time, but for a first START plain steps.
"""

from __future__ import annotations

import warnings
from collections import deque
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from skipstone.core.model import LayeredModel, unwrapped
from skipstone.core.types import Draft, RowVerdict
from skipstone.methods import profiles
from skipstone.methods.layer_sets import Objective, Space, Z, expected_speedup
from skipstone.methods.skip_costs import Timings, by_weight
from skipstone.methods.skip_search import SEARCHES, Cusum, FixedSearch, Search

if TYPE_CHECKING:
    from skipstone.methods.swift import Swift, SwiftSession

SEARCHING, SETTLED = 0.08, 0.02
"""Share of time that may be lost while the search goes on, and after it."""
START, MOST_SLACK, SEARCH_BUDGET = 8.0, 64.0, 800.0
"""Plain steps: what a model may lose at first, most slack that is kept, and most that one search may cost."""
PAYS, LEAST_STEPS, RECENT, BETTER = 1.02, 8, 64, 1.01
"""A layer set must bring so much; judged by its own steps once there are so many, by the latest so many;
another must be better by so much to take its place."""
ALPHA_STEPS, ALPHA_LEAST, RATIO_STEP, LEAST_RATIO, MORE_STEPS = 256, 0.7, 0.05, 0.2, 64
"""The skip ratio goes down where alpha over so many draft steps is too low; then the search goes on for some steps."""


_STATES: WeakKeyDictionary[Any, dict[Any, SkipState]] = WeakKeyDictionary()


def of(method: Swift, model: LayeredModel) -> SkipState:
    """The state of a method on a model: the same one for every request, as long as the model lives."""
    known = _STATES.setdefault(model.model, {})
    if method not in known:
        known[method] = SkipState(method, model)
    return known[method]


def known(method: Swift, model: Any) -> dict[str, Any]:
    """What there is to say of a method's state on a model; empty before its first request."""
    state = _STATES.get(unwrapped(model), {}).get(method)
    return {} if state is None else state.report()


class SkipState:
    """See the module. skip: the layer set to draft with."""

    def __init__(self, method: Swift, model: LayeredModel) -> None:
        self.method, self.space = method, Space(model.depth)
        self.ratio = method.skip_ratio
        self.costs = by_weight(model, self.space)
        self.timings: Timings | None = Timings(self.space)
        objective = Objective(self.costs, method.objective)
        if method.profile is None:
            count = self.space.count(self.ratio)
            self.search: Search = SEARCHES[method.search](self.space, count, objective, method.search_seed)
        else:
            found = profiles.load(method.profile, model.model)
            self.search = FixedSearch(self.space, self.space.from_skip_set(found.skip))
            self.ratio = self.search.count / self.space.size
        self.cusum = Cusum()
        self.slack, self.tokens, self.spent = START, 0.0, {"draft": 0.0, "score": 0.0, "search": 0.0, "timing": 0.0}
        self.evaluations = self.since_better = self.steps = self.drafted_steps = 0
        self.searching = self.search.adaptive and method.max_steps > 0
        self.limit = method.max_steps
        self.recent: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self.alphas: deque[tuple[int, int]] = deque()
        self.history: list[dict[str, Any]] = []
        self.said, self.spent_before = False, 0.0
        self._take(self.search.best())

    # ------------------------------------------------------------------------------------------ what to do

    @property
    def allowance(self) -> float:
        """Share of time that may be lost now."""
        return SEARCHING if self.searching else SETTLED

    def due(self, session: SwiftSession) -> Z | None:
        """A layer set to judge now; None where there is nothing to judge, or no slack for it."""
        if self.timings is not None:
            if self.slack > 2 or not self.method.guard:
                self._time(session)
            return None
        cost = self.costs.draft(self.z) * self.costs.score(self.method.context_window)
        if not self.searching or (self.slack < cost and self.method.guard):
            return None
        self._lose("search", cost)
        return self.search.propose()

    def drafts(self, allowed: bool) -> bool:
        """Whether the next step drafts. It does where that pays, and on trial while there is slack."""
        if not allowed or not self.method.guard or self.pays():
            return allowed
        trial = self.slack > self.costs.draft(self.z) + self.costs.score(3)
        if not trial and not self.searching and not self.said:
            self.said = True
            warnings.warn(self._why_not(), RuntimeWarning, stacklevel=2)
        return trial

    def _why_not(self) -> str:
        seen = "unknown" if self.matchness is None else f"{self.matchness:.2f}"
        return (
            f"swift found no layer set that pays here and decodes plainly: the best of {self.evaluations} evaluations leaves "
            f"out {int(self.z.sum())} of {self.space.size} sublayers, its matchness is {seen}, a draft costs "
            f"{self.costs.draft(self.z):.2f} plain steps and scoring 4 tokens {self.costs.score(4):.2f}"
        )

    def pays(self) -> bool:
        """By the latest steps of this layer set, or where there are too few by its matchness."""
        if len(self.recent) >= LEAST_STEPS:
            return sum(tokens for tokens, _ in self.recent) >= PAYS * sum(cost for _, cost in self.recent)
        return (
            self.matchness is not None and float(expected_speedup(self.matchness, self.costs.draft(self.z), self.costs)) > PAYS
        )

    # ----------------------------------------------------------------------------------------- what is learnt

    def learn(self, draft: Draft, verdicts: list[RowVerdict]) -> None:
        """Take over what became of a step."""
        live = [verdict for verdict in verdicts if verdict.tokens]
        tokens = sum(len(verdict.tokens) for verdict in live) / max(len(live), 1)
        steps = max((verdict.draft_steps for verdict in live), default=0)
        c, v = steps * self.costs.draft(self.z), self.costs.score(draft.width + 1)
        self.tokens += tokens
        self.spent["draft"] += c
        self.spent["score"] += v
        self._earn(tokens, c + v)
        self.steps += 1
        if not steps:
            return
        self.drafted_steps += 1
        self.recent.append((tokens, c + v))
        accepted, drafted = sum(len(one.path) for one in live), sum(one.draft_steps for one in live)
        self._follow(accepted, drafted)

    def _follow(self, accepted: int, drafted: int) -> None:
        """The skip ratio goes down where few drafts are accepted; a changed task starts the search again."""
        if self.searching or not self.search.adaptive:
            return
        self.alphas.append((accepted, drafted))
        total = sum(count for _, count in self.alphas)
        if total >= ALPHA_STEPS:
            alpha = sum(count for count, _ in self.alphas) / total
            self.alphas.popleft()
            if self.method.adjust and alpha < ALPHA_LEAST and self.ratio > LEAST_RATIO:
                self.ratio = max(LEAST_RATIO, self.ratio - RATIO_STEP)
                self.search.resize(self.space.count(self.ratio))
                self._again(MORE_STEPS)
        if self.cusum.add(accepted / max(drafted, 1)):
            self.search.widen()
            self._again(self.method.max_steps)

    def judged(self, z: Z, matchness: float, positions: int) -> None:
        """One evaluation (Eq. 4): the search learns, and the best set is drafted with."""
        self.search.observe(z, matchness, positions)
        self.evaluations += 1
        self.since_better += 1
        self._consider(self.search.best())
        self.limit -= 1
        tired = self.since_better >= self.method.patience or self.spent["search"] > SEARCH_BUDGET
        if self.limit <= 0 or tired or (self.matchness or 0) > self.method.enough:
            self.searching = False
            self.alphas.clear()

    def _consider(self, z: Z) -> None:
        """Change to a set that is clearly better than the one in use."""
        mine, new = (self._worth(one) for one in (self.z, z))
        if (z != self.z).any() and new > BETTER * mine:
            self._take(z)
            self.since_better = 0
        self.matchness = self.search.estimate(self.z)

    def _worth(self, z: Z) -> float:
        seen = self.search.estimate(z)
        return 0.0 if seen is None else self.search.objective(seen, z)

    def _take(self, z: Z) -> None:
        """Draft with a set from now on."""
        self.z, self.skip, self.matchness = z, self.space.to_skip_set(z), self.search.estimate(z)
        self.recent.clear()
        places = {"attention": sorted(self.skip.attention), "mlp": sorted(self.skip.mlp)}
        self.history.append({"evaluation": self.evaluations, "tokens": self.tokens, "matchness": self.matchness, **places})

    def _again(self, steps: int) -> None:
        """Search on."""
        self.searching, self.limit, self.since_better = True, steps, 0
        self.spent_before += self.spent["search"]
        self.spent["search"] = 0.0
        self._take(self.search.best())

    def report(self) -> dict[str, Any]:
        """Plain JSON values. Costs are in plain steps, spent too."""
        return {
            "matchness": self.matchness,
            "skip_ratio": self.ratio,
            "skipped": {"attention": sorted(self.skip.attention), "mlp": sorted(self.skip.mlp)},
            "evaluations": self.evaluations,
            "searching": self.searching,
            "timed": self.timings is None,
            "cost_of_a_draft": self.costs.draft(self.z),
            "cost_of_scoring": [self.costs.score(tokens) for tokens in (2, 4, 8, 16, 26)],
            "spent": {**self.spent, "search": self.spent["search"] + self.spent_before},
            "drafted_steps": self.drafted_steps,
            "steps": self.steps,
            "history": self.history,
        }

    # ---------------------------------------------------------------------------------------------- costs

    def _time(self, session: SwiftSession) -> None:
        assert self.timings is not None
        self._lose("timing", self.timings.next(session))
        if (costs := self.timings.costs()) is not None:
            self.timings, self.costs = None, costs
            self.search.objective = Objective(costs, self.method.objective)
            self.recent.clear()

    def _earn(self, tokens: float, cost: float) -> None:
        self.slack = min(self.slack + (1 + self.allowance) * tokens - cost, MOST_SLACK)

    def _lose(self, what: str, cost: float) -> None:
        self.spent[what] += cost
        self.slack -= cost
