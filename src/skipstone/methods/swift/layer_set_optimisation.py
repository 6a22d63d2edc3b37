"""SWIFT's layer set optimisation (section 4.1): the set in use, and when the search for a better one ends."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from skipstone.decoding.draft import RowVerdict
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.layer_sets import LayerMask, LayerSetSpace, SearchObjective
from skipstone.methods.swift.layer_set_search import SEARCHES, LayerSetSearch
from skipstone.models.passes import SkipSet
from skipstone.utils.limits import SMALL_STATE_BYTES

HISTORY = 500  # maximum number of stored changes of the layer set
RATIO_STEP = 0.1  # the skip ratio is lowered by so much (footnote 3: from .5 to .4)
NUMBER_BYTES = 64  # assumed size of a number in the history


class LayerSetOptimisation:
    """Section 4.1.2, across requests: evaluates sets until the stopping rule holds. The best one so far drafts.

    Footnote 3: the skip ratio is lowered while the acceptance rate stays below a tolerance. The paper prints no other rule.
    Ours: if the search would end because no better set is found, and the drafts of the best one were accepted too rarely, it
    goes on with a lower ratio.

    method: a `Swift`. profile: a fixed set instead of a search. skipped, skip: the set in use, as a mask and as a SkipSet.
    matchness: its estimate, None if unknown. accepted, draft_steps: numbers with this set. evaluations: number so far.
    searching: the search continues. steps: number of steps with drafts.
    """

    def __init__(self, method: Any, model: ModelRunner, profile: SkipSet | None = None) -> None:
        self.space, self.patience, self.target_matchness = LayerSetSpace.of(model), method.patience, method.target_matchness
        self.min_acceptance_rate, self.ratio = method.min_acceptance_rate, method.skip_ratio
        if profile is None:
            kind, by = SEARCHES[method.search], SearchObjective(by="matchness")
            count = kind.count_of(self.space, self.ratio)
            self.search = kind(self.space, count, by, method.search_seed, interval=method.bayes_interval)
        else:
            first = self.space.from_skip_set(profile)
            self.search = LayerSetSearch(self.space, int(first.sum()), first=first)
        self.steps_left, self.evaluations, self.since_better, self.steps = method.max_steps, 0, 0, 0
        self.searching = self.search.adaptive and method.max_steps > 0
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self._use(self.search.best())

    @property
    def nbytes(self) -> int:
        """Approximate size of the history: a number for each sublayer and change."""
        return SMALL_STATE_BYTES + HISTORY * self.space.size * NUMBER_BYTES

    def _use(self, skipped: LayerMask) -> None:
        """Draft with a set from now on."""
        self.accepted, self.draft_steps = 0, 0
        self.skipped, self.skip = skipped, self.space.to_skip_set(skipped)
        self.matchness = self.search.estimate(skipped)
        self.history.append({"evaluation": self.evaluations, "matchness": self.matchness, **self._places()})

    def candidate(self) -> LayerMask | None:
        """The next set to evaluate; None after the end of the search."""
        return self.search.propose() if self.searching else None

    def evaluated(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        """Record one evaluation (Eq. 4), choose the set in use, and apply the stopping rule."""
        search = self.search
        search.observe(skipped, matchness, positions)
        self.evaluations, self.since_better, self.steps_left = self.evaluations + 1, self.since_better + 1, self.steps_left - 1
        best = search.best()
        if bool((best != self.skipped).any()) and (search.estimate(best) or 0.0) > (search.estimate(self.skipped) or 0.0):
            self.since_better = 0
            self._use(best)
        self.matchness = search.estimate(self.skipped)
        is_reached = self.matchness is not None and self.matchness > self.target_matchness
        self.searching = self.steps_left > 0 and not is_reached and (self.since_better < self.patience or self._lower_ratio())

    def drafted(self, verdicts: Sequence[RowVerdict]) -> None:
        """Count a step with drafts of the set in use."""
        self.steps += 1
        self.accepted += sum(len(verdict.path) for verdict in verdicts)
        self.draft_steps += sum(verdict.draft_steps for verdict in verdicts)

    def _lower_ratio(self) -> bool:
        """Search sets of a lower ratio if too few drafts are accepted. Returns False if the ratio stays."""
        min_rate = self.min_acceptance_rate
        if min_rate is None or not self.draft_steps or self.accepted >= min_rate * self.draft_steps:
            return False
        ratio = round(self.ratio - RATIO_STEP, 4)
        if (count := self.search.count_of(self.space, ratio)) < 1:
            return False
        self.ratio, self.since_better = ratio, 0
        self.search.resize(count)
        self._use(self.search.best())
        return True

    def _places(self) -> dict[str, list[int]]:
        return {"attention": sorted(self.skip.attention), "mlp": sorted(self.skip.mlp)}

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "matchness": self.matchness,
            "skip_ratio": round(int(self.skipped.sum()) / self.space.size, 4),
            "skipped": self._places(),
            "evaluations": self.evaluations,
            "searching": self.searching,
            "steps": self.steps,
            "history": list(self.history),
        }
