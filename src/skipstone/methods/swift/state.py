"""What SWIFT knows about a model across requests, beside the search itself (`Optimisation`). All of it is ours.

It knows what passes cost here, whether drafting pays (`Payoff`), whether the texts have changed and how many sublayers are best
left out. Every cost is in plain steps. The uniform set drafts first, then passes are timed, then the search begins.
"""

from collections import deque
from dataclasses import replace
from typing import Any

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.session import Session
from skipstone.methods.shared.layer_sets import MOST_DRAFTS, Costs, LayerMask, Objective, Space
from skipstone.methods.shared.payoff import FIRST_SLACK, PROBE, SPIKE, Payoff, TextChange
from skipstone.methods.swift.optimisation import Optimisation
from skipstone.methods.swift.search import SEARCHES, Search
from skipstone.methods.swift.settings import SwiftSettings
from skipstone.methods.swift.timings import Timings, costs_by_weight
from skipstone.methods.swift.tree import MOST_LEAVES, RANKS
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import SkipSet

SEARCH_LOSS = 0.04  # share of time that may be lost while the search goes on
SETTLED_LOSS = 0.02  # share of time that may be lost after it
SEARCH_BUDGET = 700.0  # plain steps that a guarded search may cost
FIRST_DRAFTS = 4  # steps that draft before anything is timed
LEAF_COST = 0.1  # plain steps that the runners-up of a step may cost
PAID = 1.1  # speed-up at which a layer set has paid
LOST = 0.85  # speed-up at which one that has paid is lost, and a new search begins
ALPHA_STEPS = 256  # draft passes over which alpha, the share of accepted drafts, is taken
LEAST_ALPHA = 0.7  # alpha under which the skip ratio goes down
MORE_EVALUATIONS = 64  # evaluations of the search that follows
RATIO_STEP = 0.05  # how far the skip ratio moves at once (one sublayer at least)
LEAST_RATIO = 0.2
MOST_RATIO = 0.8
RESIZE_EVERY = 16  # evaluations between two moves of the skip ratio
HISTORY = 500  # changes of the layer set that are remembered
TOLD = 96  # steps before a user is told that nothing pays


class SwiftState:
    """See the module. profile: a layer set that was found before, then nothing is searched. rows: of the batch."""

    def __init__(self, method: SwiftSettings, model: LayeredModel, profile: SkipSet | None = None, rows: int = 1) -> None:
        self.method, self.space = method, Space.of(model)
        objective = Objective(
            costs_by_weight(model, self.space), method.objective, min(method.num_speculative_tokens, MOST_DRAFTS)
        )
        if profile is None:
            count = self.space.count(method.skip_ratio)
            kind, seed = SEARCHES[method.search], method.search_seed
            self.search = kind(self.space, count, objective, seed, interval=method.bayes_interval)
        else:
            first = self.space.from_skip_set(profile)
            self.search = Search(self.space, int(first.sum()), objective, first=first)
        self.optimisation = Optimisation(self.search, method.max_steps, method.patience, method.enough)
        self.payoff = Payoff(SEARCH_LOSS if self.optimisation.searching else SETTLED_LOSS, method.guard)
        # an evaluation is a pass of one row, costs are those of passes of all rows: so many tokens a row are as many in all
        self.evaluation_width = -(-method.context_window // rows)
        leaves = MOST_LEAVES if method.dynamic_verification and not method.guard else 0  # a guard allows as many as are timed
        widest = max(1 + method.num_speculative_tokens + leaves, self.evaluation_width)
        self.timings = Timings(self.space, widest) if method.guard or method.objective == "speed" else None
        self.evaluation_ratio = 1.0  # measured over expected cost of the latest evaluation
        self._charged = 0.0  # expected cost of the latest evaluation
        self._evaluated_last = False  # whether there was an evaluation since the last step that drafted
        self.steps = self.drafted_steps = 0
        self.tokens = 0.0  # committed, mean of the rows
        self.spent = {"draft": 0.0, "score": 0.0, "search": 0.0, "timing": 0.0}
        self._at_search = (0.0, 0.0)  # tokens and spent["search"] when the latest search began
        self.text_change, self._has_paid = TextChange(), False
        self._alphas: deque[tuple[int, int]] = deque()  # (accepted drafts, draft passes) of steps since the latest search
        self.history: deque[dict[str, Any]] = deque(maxlen=HISTORY)
        self.set_costs(objective.costs)
        self._set_changed()

    # ------------------------------------------------------------------------------------------ what may be done

    def time_pass(self, session: Session) -> None:
        """Time one more pass, where it can be paid for. The last one makes the costs known."""
        assert self.timings is not None
        estimate, payoff = self.timings.next_cost(self.costs), self.payoff
        if payoff.enabled and (self.drafted_steps < FIRST_DRAFTS or not payoff.affords(estimate)):
            return
        self._spend("timing", min(self.timings.time_next(session), SPIKE * estimate))  # a first pass may load kernels
        if (costs := self.timings.costs()) is not None:
            self.timings = None
            self.set_costs(costs)

    def candidate(self) -> LayerMask | None:
        """A layer set to evaluate now, which is paid for; None where the search is over or has to wait."""
        cost = self.evaluation_ratio * self.draft_cost * self.costs.score(self.evaluation_width)
        if not self.optimisation.searching or (self.payoff.enabled and not self._may_evaluate(cost)):
            return None
        self._spend("search", cost)
        self._charged = cost
        return self.search.propose()

    def _may_evaluate(self, cost: float) -> bool:
        """Whether there is slack for an evaluation. The search keeps to its share of the time also where drafting pays and
        there is plenty, and takes turns with probes, or the one would leave no slack for the other."""
        if self._evaluated_last and self.payoff.probe_is_due():
            return False
        share = SEARCH_LOSS * (self.tokens - self._at_search[0]) + FIRST_SLACK
        return self.payoff.affords(cost) and self._search_cost() + cost <= share

    def most_drafts(self, limit: int) -> int:
        """How many tokens the next step may draft, 0 to `limit`."""
        drafts = min(limit, self.method.num_speculative_tokens, PROBE)
        probe = drafts * self.draft_cost + self.costs.score(1 + drafts + self._most_leaves(drafts)) - 1
        return self.payoff.most_drafts(limit, probe)

    def leaves(self, drafts: int) -> tuple[int, float]:
        """(how many runners-up a step of so many drafts may verify, how likely one must be to be worth its cost: it brings a
        token, which is thought to be worth a plain step)."""
        most, width = self._most_leaves(drafts), 1 + drafts
        if not most or not self.payoff.enabled:
            return most, 0.0
        return most, (self.costs.score(width + most) - self.costs.score(width)) / most

    def _most_leaves(self, drafts: int) -> int:
        if drafts not in self._leaves:
            self._leaves[drafts] = self._find_most_leaves(drafts)
        return self._leaves[drafts]

    def _find_most_leaves(self, drafts: int) -> int:
        if not self.method.dynamic_verification:
            return 0
        most = min((RANKS - 1) * drafts, MOST_LEAVES)
        if not self.payoff.enabled:
            return most
        scoring = self.costs.scoring[drafts : drafts + most + 1]  # with 0, 1, ... of them; what a wider pass costs nobody knows
        return max((leaves for leaves, cost in enumerate(scoring) if cost <= scoring[0] + LEAF_COST), default=0)

    # ---------------------------------------------------------------------------------------------- what is learnt

    def record(self, draft: Draft, verdicts: list[RowVerdict], seconds: float | None = None) -> None:
        """Take over what became of a step. seconds: that it took; None where its passes are to tell."""
        if not draft.width and len(verdicts) == 1:
            self._record_plain(len(verdicts[0].tokens), seconds)
            return
        live = [verdict for verdict in verdicts if verdict.tokens]
        passes = (draft.width if draft.levels is None else draft.levels) if any(one.draft_steps for one in live) else 0
        tokens = sum(len(verdict.tokens) for verdict in live) / max(len(live), 1)
        drafting, scoring = passes * self.draft_cost, self.costs.score(draft.width + 1)
        ratio = self.payoff.clock(drafting + scoring, seconds, drafted=passes > 0)
        self.payoff.record(tokens, ratio * (drafting + scoring), drafted=passes > 0)
        self.steps += 1
        self.drafted_steps += passes > 0
        self.tokens += tokens
        self.spent["draft"] += ratio * drafting
        self.spent["score"] += ratio * scoring
        if passes:
            self._evaluated_last = False
            right = [sum(node < one.draft_steps for node in one.path) for one in live]  # runners-up come behind the chain
            drafted = [one.draft_steps for one in live]
            wrong = sum(fewer < most for fewer, most in zip(right, drafted, strict=True))
            if self.optimisation.adaptive and not self.optimisation.searching:
                self._look_for_change(sum(right), sum(drafted), wrong)

    def _record_plain(self, tokens: int, seconds: float | None) -> None:
        """The same of a plain step of one row, with few words: most steps are such where nothing pays."""
        self.payoff.clock(1.0, seconds, drafted=False)
        self.payoff.record(tokens, 1.0, drafted=False)
        self.steps += 1
        self.tokens += tokens
        self.spent["score"] += 1.0

    def evaluated(self, skipped: LayerMask, matchness: float, positions: int) -> None:
        """Take over an evaluation, draft with the best set, and end the search where its time has come."""
        self._evaluated_last = True
        self.optimisation.observe(skipped, matchness, positions)
        moving = self._move_skip_ratio()
        if self.optimisation.choose(cautious=self.payoff.pays()):
            self._set_changed()
        too_dear = self.payoff.enabled and self._search_cost() > SEARCH_BUDGET
        if self.optimisation.is_over(good_enough=not moving) or too_dear:
            self.optimisation.searching = False
            self.payoff.loss_share, self._has_paid = SETTLED_LOSS, False
            self._alphas.clear()

    def evaluation_took(self, seconds: float) -> None:
        """The time of the latest evaluation, where it could be clocked: more or less was spent than thought."""
        if self.payoff.plain_seconds and self._charged:
            ratio = min(max(self.payoff.in_plain_steps(seconds) / self._charged, 1 / SPIKE), SPIKE)
            self._spend("search", (ratio - 1) * self._charged)
            self.evaluation_ratio *= ratio

    def set_costs(self, costs: Costs) -> None:
        """Take over what passes cost."""
        self.costs, self.draft_cost = costs, costs.draft(self.optimisation.skipped)
        self._leaves: dict[int, int] = {}  # drafts -> most runners-up
        self.search.objective = replace(self.search.objective, costs=costs)

    def _set_changed(self) -> None:
        """Another set drafts. Where the last one pays, its steps speak for this one, until that has its own."""
        skipped = self.optimisation.skipped
        self.skip, self.draft_cost = self.space.to_skip_set(skipped), self.costs.draft(skipped)
        if not self.payoff.pays():
            self.payoff.forget_drafts()
        at = {"evaluation": self.optimisation.evaluations, "tokens": self.tokens, "matchness": self.optimisation.matchness}
        self.history.append({**at, **self._places()})

    def _spend(self, what: str, cost: float) -> None:
        self.spent[what] += cost
        self.payoff.spend(cost)

    def _search_cost(self) -> float:
        """What the latest search has cost so far."""
        return self.spent["search"] - self._at_search[1]

    # --------------------------------------------------------------------------- changed texts and the skip ratio

    def _look_for_change(self, right: int, drafted: int, wrong: int) -> None:
        """After a search: changed texts, or a set that paid and does not any more, start it again. The share of right drafts
        among those that were judged does not depend on how many were drafted."""
        speedup, judged = self.payoff.speedup(), max(right + wrong, 1)
        self._has_paid = self._has_paid or (speedup is not None and speedup >= PAID)
        lost = self._has_paid and speedup is not None and speedup < LOST
        changed = self.text_change.add(right / judged, judged) or lost
        if changed and not self.search.keeps_highest:  # the paper's search ends for good
            self.search.doubt()
            self._search_again(self.method.max_steps)
        else:
            self._lower_skip_ratio(right, drafted)

    def _search_again(self, evaluations: int) -> None:
        self.optimisation.restart(evaluations)
        self.payoff.loss_share, self.text_change = SEARCH_LOSS, TextChange()
        self._at_search = (self.tokens, self.spent["search"])

    def _lower_skip_ratio(self, right: int, drafted: int) -> None:
        """Leave out fewer sublayers where few drafts are accepted, unless the search expects less of that."""
        self._alphas.append((right, drafted))
        passes = sum(count for _, count in self._alphas)
        if passes < ALPHA_STEPS:
            return
        alpha = sum(count for count, _ in self._alphas) / passes
        self._alphas.popleft()
        fewer, now = min(self._other_counts()), self.search.count
        if not self.method.adjust or alpha >= LEAST_ALPHA or fewer >= now:
            return
        if self.search.best_worth(fewer) >= self.search.best_worth(now):  # both are 0 where it cannot tell
            self.search.resize(fewer)
            self.optimisation.use(self.search.best())
            self._set_changed()
            self._search_again(MORE_EVALUATIONS)

    def _move_skip_ratio(self) -> bool:
        """Now and then, go to where the search expects more. Returns whether it expects more elsewhere."""
        if not self.method.adjust or self.method.objective != "speed":
            return False
        worth, count = max((self.search.best_worth(count), count) for count in self._other_counts())
        elsewhere = worth > self.search.best_worth(self.search.count)
        if elsewhere and self.optimisation.evaluations % RESIZE_EVERY == 0:
            self.search.resize(count)
        return elsewhere

    def _other_counts(self) -> list[int]:
        """How many sublayers are left out after a change of the skip ratio: fewer, more."""
        size, now = self.space.size, self.search.count
        step, least, most = max(1, round(RATIO_STEP * size)), max(1, round(LEAST_RATIO * size)), round(MOST_RATIO * size)
        return [min(max(count, least), most) for count in (now - step, now + step)]

    # ----------------------------------------------------------------------------------------- what there is to say

    def _places(self) -> dict[str, list[int]]:
        return {"attention": sorted(self.skip.attention), "mlp": sorted(self.skip.mlp)}

    def report(self) -> dict[str, Any]:
        """Plain JSON values. Costs are in plain steps, spent too."""
        return {
            "matchness": self.optimisation.matchness,
            "skip_ratio": round(int(self.optimisation.skipped.sum()) / self.space.size, 4),
            "skipped": self._places(),
            "evaluations": self.optimisation.evaluations,
            "searching": self.optimisation.searching,
            "pays": self.payoff.pays(),
            "timed": self.timings is None,
            "cost_of_a_draft": self.draft_cost,
            "cost_of_scoring": {str(tokens): self.costs.score(tokens) for tokens in (2, 4, 8, 16, 32)},
            "spent": dict(self.spent),
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "history": list(self.history),
        }

    def remark(self) -> str | None:
        """That no layer set pays here; None where one does, or where too little is known."""
        payoff, found = self.payoff, self.optimisation
        if not payoff.enabled or payoff.pays() or self.steps < TOLD:
            return None
        speedup = payoff.speedup()
        if 4 * self.drafted_steps > self.steps if speedup is None else speedup >= 1:
            return None
        seen = "" if found.matchness is None else f", its matchness is {found.matchness:.2f}"
        judged = f"the best of {found.evaluations} evaluations" if found.evaluations else "the one there is"
        so_far = " so far" if found.searching else ""
        return (
            f"swift found no layer set that pays here{so_far} and decodes plainly, but for trials: {judged} leaves out "
            f"{int(found.skipped.sum())} of {self.space.size} sublayers{seen}, a draft costs {self.draft_cost:.2f} plain steps "
            f"and scoring 4 tokens {self.costs.score(4):.2f}"
        )
