"""SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration
(Xia et al., ICLR 2025, arXiv 2410.06916), section 4 and appendix B.

The target drafts without some attention and MLP sublayers, and verifies the chain with its runners-up as one tree. A search
finds the sublayers while decoding: it evaluates a layer set on the latest text, by the share of tokens that the set predicts
like the target. Verification overwrites the keys and values of drafting; nothing is cloned.

The search is in layer_set_search.py, its end in layer_set_optimisation.py, the tree in tree.py, the end of a chain in
drafting/chain_stop_rule.py. Deviations: drafts are coupled to the target's noise, so `match` verifies the tree at every
temperature. With `auto` and `guard=true` the drafts are chains, and the budget limits the evaluations.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from skipstone.decoding import method_states
from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Verdict
from skipstone.decoding.drafter import Candidate, Drafter, layers_used
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.decoding.settings import setting
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.model_runner import ModelRunner, unwrapped
from skipstone.methods.drafting.candidates import layer_candidate
from skipstone.methods.drafting.chain import replay_hidden_states
from skipstone.methods.drafting.chain_stop_rule import Threshold
from skipstone.methods.drafting.layer_sets import LayerMask, LayerSetSpace, load_profile, save_profile
from skipstone.methods.drafting.shortlist import ShortlistMethod
from skipstone.methods.drafting.sublayer_skipping import SkippingDrafter
from skipstone.methods.swift.layer_set_optimisation import LayerSetOptimisation
from skipstone.methods.swift.layer_set_search import SearchName
from skipstone.methods.swift.tree import MAX_LEAVES, RANKS, with_leaves
from skipstone.models.passes import SkipSet
from skipstone.policy.draft_length import MAX_DRAFTS

Window = deque[tuple[int, Tensor]]


@dataclass(frozen=True)
class Swift(ShortlistMethod):
    """SWIFT: the target drafts without some sublayers, which a search finds while decoding. Defaults: appendix B.2."""

    name: ClassVar[str] = "swift"
    positional: ClassVar[str] = "leaves sublayers out and verifies trees"
    aliases: ClassVar[dict[str, str]] = {"num_assistant_tokens": "num_speculative_tokens", "enough": "target_matchness"}
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that drafting skips too many sublayers of this model."

    skip_ratio: float = setting(
        0.45, "share of the sublayers between the first and the last layer that drafting skips.", within=(0, 1)
    )
    num_speculative_tokens: int = setting(25, "maximum drafts a step.")
    confidence_threshold: Threshold = setting(
        0.8, "stop after a draft whose probability is below it; None never stops early.", within=(0, 1)
    )
    context_window: int = setting(32, "generated tokens that evaluate a layer set.")
    search: SearchName = setting("swift", "swift (the paper's), linear_ts, random or uniform (none).")
    bayes_interval: int = setting(25, "beta: one of so many evaluations of search=swift is Bayesian.")
    max_steps: int = setting(1000, "the search ends after so many evaluations.", min_value=0)
    patience: int = setting(300, "it ends after so many evaluations without a better set.")
    target_matchness: float = setting(0.95, "it ends at this matchness.", within=(0, 1))
    dynamic_verification: bool = setting(True, "verify runners-up, too.")
    profile: str | None = setting(None, "a file of `skipstone search`, or a hub id, instead of a search.")
    search_seed: int = setting(0, "of the search; it changes speed and never the text.", min_value=0)

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        space = LayerSetSpace.of(model)
        if not 0 < space.count(self.skip_ratio) < space.size:
            raise ValueError(
                f"skip_ratio={self.skip_ratio} leaves out {space.count(self.skip_ratio)} of the {space.size} sublayers that "
                f"may be skipped in a model of {model.depth} layers: it must skip at least one and keep at least one"
            )
        if self.profile is not None:
            space.from_skip_set(load_profile(self.profile, model.model).skip)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return SwiftDrafter(self, model, rows, self.optimisation(model))

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """Drafts chains, and `auto` decides their length. `auto`'s replays are the evaluations of the search."""
        optimisation = self.optimisation(model)
        drafter = SwiftChainDrafter(optimisation, model, rows, MAX_DRAFTS, self.shortlist(model))
        layers = model.depth - float(optimisation.skipped.sum()) / 2
        return {"swift": replace(layer_candidate(drafter, self, model, layers), searches=True)}

    def optimisation(self, model: ModelRunner) -> LayerSetOptimisation:
        """The state of the search on a model, across requests."""
        skip = None if self.profile is None else load_profile(self.profile, model.model).skip
        return method_states.method_state(self, model, 1, skip, lambda: LayerSetOptimisation(self, model, skip))

    def save(self, model: Any, path: str | Path) -> None:
        """Write the best layer set for a model to a profile. ValueError before the first request."""
        if not (report := self.report(model)):
            raise ValueError("there is nothing to save: swift has not decoded with this model and these settings yet")
        about = {name: report[name] for name in ("matchness", "evaluations", "skip_ratio")}
        save_profile(Path(path), unwrapped(model), about, **report["skipped"])


class SwiftChainDrafter(SkippingDrafter):
    """Drafts with the best layer set of SWIFT's optimisation. While that searches, each replay evaluates a candidate set.

    Such a replay counts as one of this drafter only if the candidate becomes the set in use."""

    def __init__(
        self, optimisation: LayerSetOptimisation, model: ModelRunner, rows: int, max_drafts: int, shortlist: Tensor | None
    ) -> None:
        super().__init__(model, rows, max_drafts=max_drafts, threshold=None)
        self.optimisation, self._candidate, self.shortlist = optimisation, optimisation.skipped, shortlist
        self.skip = optimisation.skip

    def choose_replay_skip(self) -> SkipSet:
        self.skip, candidate = self.optimisation.skip, self.optimisation.candidate()
        self._candidate = self.optimisation.skipped if candidate is None else candidate
        return self.optimisation.space.to_skip_set(self._candidate)

    def observe_replay(self, right: Sequence[bool]) -> bool:
        if self.optimisation.searching:
            self.optimisation.evaluated(self._candidate, sum(right) / len(right), len(right))
            self.skip = self.optimisation.skip
        return bool((self._candidate == self.optimisation.skipped).all())


class SwiftDrafter(SkippingDrafter):
    """Drafts with a layer set that is optimised across requests."""

    def __init__(self, method: Swift, model: ModelRunner, rows: int, optimisation: LayerSetOptimisation) -> None:
        max_drafts = method.num_speculative_tokens
        ranks, threshold = RANKS if method.dynamic_verification else 1, method.confidence_threshold
        super().__init__(model, rows, max_drafts=max_drafts, threshold=threshold, ranks=ranks)
        self.scratch_slots = max(min(max_drafts * RANKS, max_drafts + MAX_LEAVES), method.context_window)
        self.optimisation, self.shortlist, self.gamma = optimisation, method.shortlist(model), method.context_window
        # context accumulation (section 4.1.1): the latest 1 + gamma tokens of every row, each with the target's own choice
        self.windows: list[Window] = [deque(maxlen=1 + self.gamma) for _ in range(rows)]
        self._choices: Tensor | None = None  # [B, 1 + n], the target's choices in this step
        self._evaluation: tuple[LayerMask, Tensor] | None = None  # a set, and its number of correct tokens
        self._turn = 0  # number of evaluations so far; rows are used round-robin

    def describe(self, name: str) -> list[dict[str, Any]]:
        return [layers_used(name, skip=self.optimisation.skip)]

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.windows[row].clear()

    def run_background_work(self) -> None:
        """An optimisation step (section 4.1.2): evaluate a candidate on the latest tokens of one row."""
        rows = [row for row, alive in enumerate(self.view.alive) if alive and len(self.windows[row]) > self.gamma]
        if not rows or (candidate := self.optimisation.candidate()) is None:
            return
        self._turn += 1
        row = rows[self._turn % len(rows)]
        tokens, chosen = zip(*self.windows[row], strict=True)
        skip = self.optimisation.space.to_skip_set(candidate)
        hidden = replay_hidden_states(self.view.store, row, tokens[:-1], self.model, self.model.depth, skip)
        predicted = self.model.logits(hidden, self.shortlist)[0].argmax(-1)  # [gamma]
        self._evaluation = candidate, (predicted == torch.stack(chosen[1:])).sum().to("cpu", non_blocking=True)

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """Section 4.2: a chain drafted with the layer set while it is confident, and its runners-up, as one tree."""
        chain, ranked = self.chain(limits, self.optimisation.skip)
        if ranked is None:
            return chain
        tree = with_leaves(chain, *ranked)
        if tree.width == chain.width:
            return chain
        max_drafts = [tree.width if alive else 0 for alive in self.view.alive]
        tree.forward = self.view.start_forward(max_drafts, self.shortlist, self.drafting_model)
        tree.forward.append(tree.tokens, tree.valid, tree.parents)
        return tree

    def observe_scores(self, draft: Draft, scores: Scores, verdict: Verdict | GreedyVerdict) -> None:
        self._choices = scores.best if self.optimisation.searching else None

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().observe_commits(draft, verdicts)
        self._accumulate(verdicts)
        self.optimisation.steps += draft is not None and draft.width > 0
        if self._evaluation is not None:  # its transfer is done, because the step's own transfer came later
            (candidate, matched), self._evaluation = self._evaluation, None
            self.optimisation.evaluated(candidate, float(matched.numpy()) / self.gamma, self.gamma)  # Eq. 4

    def _accumulate(self, verdicts: list[RowVerdict]) -> None:
        """Context accumulation: add the tokens of a step with the target's choices."""
        choices, self._choices = self._choices, None  # [B, 1 + n]
        for row, verdict in enumerate(verdicts):
            if choices is None:
                self.windows[row].clear()
            elif verdict.tokens:
                nodes = [0, *(node + 1 for node in verdict.path)]  # the places of the tokens in `choices`
                chosen = choices[row].unbind(0)
                self.windows[row].extend((token, chosen[node]) for token, node in zip(verdict.tokens, nodes, strict=False))
