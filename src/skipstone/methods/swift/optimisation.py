"""SWIFT's layer set optimisation (section 4.1): which set drafts, and when the search for a better one ends."""

from skipstone.methods.shared.layer_sets import LayerMask
from skipstone.methods.swift.search import Search

BETTER = 1.01  # times the worth of the set in use that another one must have to take its place; 1 in the paper
LEAST_EVALUATIONS = 16  # evaluations of a search before any set is good enough to end it; none in the paper


class Optimisation:
    """Section 4.1.2, across requests. One evaluation follows another until the stopping rule holds; the best set so far drafts.

    skipped: the set in use. matchness: the estimate of it. searching: whether the search goes on. The paper's never begins
    again after its end; `restart` is ours.
    """

    def __init__(self, search: Search, max_steps: int, patience: int, enough: float) -> None:
        self.search, self.patience, self.enough = search, patience, enough
        self.adaptive = search.adaptive and max_steps > 0
        self.evaluations = 0  # of all searches
        self.restart(max_steps)
        self.searching = self.adaptive
        self.use(search.best())

    def restart(self, steps: int) -> None:
        """Search for so many more evaluations at most."""
        self.searching, self.steps_left, self.since_better, self.begun_at = True, steps, 0, self.evaluations

    def use(self, skipped: LayerMask) -> None:
        """Draft with a set from now on."""
        self.skipped, self.matchness = skipped, self.search.estimate(skipped)

    def observe(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        """Take over one evaluation (Eq. 4)."""
        self.search.observe(skipped, matchness, positions)
        self.evaluations += 1
        self.since_better += 1
        self.steps_left -= 1

    def choose(self, cautious: bool) -> bool:
        """Change to the best set where it is clearly better. Returns whether it was. cautious: the set in use works, and is
        left only for one that is better by its matchness less a standard error."""
        search, best = self.search, self.search.best()
        hoped, now = search.estimate(best) or 0.0, search.estimate(self.skipped)
        if cautious and not search.keeps_highest:
            hoped = (hoped + search.nearly_certain(best)) / 2
        worth = 0.0 if now is None else search.objective(now, self.skipped)
        least = worth if search.keeps_highest else BETTER * worth
        better = bool((best != self.skipped).any()) and search.objective(hoped, best) > least
        if better:
            self.since_better = 0
        self.use(best if better else self.skipped)
        return better

    def is_over(self, good_enough: bool = True) -> bool:
        """The stopping rule. good_enough: whether a matchness of `enough` ends the search."""
        if self.search.keeps_highest:
            found = good_enough and (self.search.estimate(self.skipped) or 0.0) > self.enough
        else:
            good_enough = good_enough and self.evaluations - self.begun_at >= LEAST_EVALUATIONS
            found = good_enough and self.search.nearly_certain(self.skipped) > self.enough
        return self.steps_left <= 0 or self.since_better >= self.patience or found
