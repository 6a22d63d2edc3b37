"""SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration
(Xia et al., ICLR 2025, arXiv 2410.06916), section 4 and appendix B.

The target drafts without some attention and MLP sublayers, and verifies the chain with its runners-up as one tree. A search
finds the sublayers while decoding: it evaluates a layer set on the latest text, by the share of tokens that the set predicts
like the target. Verification overwrites the keys and values of drafting; nothing is cloned.

The search is in layer_set_search.py, its end in layer_set_optimisation.py, the tree in tree.py, the end of a chain in
drafting/chain_stop_rule.py. Deviations: by default drafts are coupled to the target's noise, so that `match` verifies the tree
at every temperature. With `auto` and `guard=true` the drafts are chains, and the budget limits the evaluations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from skipstone.decoding import method_states
from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Candidate, Drafter, layers_used
from skipstone.decoding.method import Preset
from skipstone.decoding.request import Request
from skipstone.decoding.settings import RejectionRule, setting, whole_numbers
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.host_transfer import on_device
from skipstone.engines.model_runner import ModelRunner, unwrapped
from skipstone.methods.drafting.bayesian_optimizer import expect_package
from skipstone.methods.drafting.candidates import layer_candidate
from skipstone.methods.drafting.chain import replay_hidden_states
from skipstone.methods.drafting.chain_stop_rule import Threshold
from skipstone.methods.drafting.layer_sets import LayerMask, LayerSetSpace, load_profile, save_profile
from skipstone.methods.drafting.shortlist import ShortlistMethod
from skipstone.methods.drafting.sublayer_skipping import SkippingDrafter
from skipstone.methods.swift.layer_set_optimisation import LayerSetOptimisation
from skipstone.methods.swift.layer_set_search import SEARCHES, SearchName
from skipstone.methods.swift.presets import PAPER, RELEASE
from skipstone.methods.swift.tree import CONFIDENCES, max_leaves, with_leaves
from skipstone.models.passes import SkipSet
from skipstone.policy.draft_length import MAX_DRAFTS


@dataclass(frozen=True)
class Swift(ShortlistMethod):
    """SWIFT: the target drafts without some sublayers, which a search finds while decoding. Defaults: appendix B.2."""

    name: ClassVar[str] = "swift"
    positional: ClassVar[str] = "leaves sublayers out and verifies trees"
    aliases: ClassVar[dict[str, str]] = {"num_assistant_tokens": "num_speculative_tokens", "enough": "target_matchness"}
    presets: ClassVar[dict[str, Preset]] = {"paper": PAPER, "release": RELEASE}
    if_few_accepted: ClassVar[str] = "An acceptance rate that low says that drafting skips too many sublayers of this model."

    skip_ratio: float = setting(
        0.45, "share of the sublayers between the first and the last layer that drafting skips.", within=(0, 1)
    )
    num_speculative_tokens: int = setting(25, "maximum drafts a step.")
    confidence_threshold: Threshold = setting(
        0.8, "stop after a draft whose probability is below it; None never stops early.", within=(0, 1)
    )
    context_window: int = setting(32, "generated tokens that evaluate a layer set.")
    search: SearchName = setting("swift", "swift (the paper's), release (its code's), linear_ts, random or uniform (none).")
    bayes_interval: int = setting(25, "beta: one of so many evaluations of search=swift or release is Bayesian.")
    max_steps: int = setting(1000, "the search ends after so many evaluations.", min_value=0)
    patience: int = setting(300, "it ends after so many evaluations without a better set.")
    target_matchness: float = setting(0.95, "it ends at this matchness.", within=(0, 1))
    dynamic_verification: bool = setting(True, "verify runners-up, too.")
    candidate_counts: tuple[int, ...] = setting(
        (10, 5, 3, 1), "k, tokens to verify for a draft's probability in (0, .5], (.5, .8], (.8, .95], (.95, 1]."
    )
    min_acceptance_rate: float | None = setting(
        0.7, "lower skip_ratio by .1 if `patience` ends with an acceptance rate below it; None never does.", within=(0, 1)
    )
    rejection_sample_method: RejectionRule | None = setting(
        "coupled",
        "'standard' is recursive rejection; 'coupled' draws drafts from the target's own noise: same seed, same text as plain; "
        "None refuses to sample",
    )
    profile: str | None = setting(None, "a file of `skipstone search`, or a hub id, instead of a search.")
    search_seed: int = setting(0, "of the search; it changes speed and never the text.", min_value=0)

    def __post_init__(self) -> None:
        object.__setattr__(
            self, "candidate_counts", whole_numbers("candidate_counts", self.candidate_counts, "numbers of candidates")
        )

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        space = LayerSetSpace.of(model)
        count = SEARCHES[self.search].count_of(space, self.skip_ratio)
        if not 0 < count < space.size:
            raise ValueError(
                f"skip_ratio={self.skip_ratio} leaves out {count} of the {space.size} sublayers that may be skipped in a model "
                f"of {model.depth} layers: it must skip at least one and keep at least one"
            )
        if len(self.candidate_counts) != len(CONFIDENCES) + 1 or min(self.candidate_counts) < 1:
            raise ValueError(
                f"candidate_counts must be {len(CONFIDENCES) + 1} numbers of at least 1, found {self.candidate_counts}"
            )
        if self.search == "release" and self.profile is None:
            expect_package()
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
        max_drafts, threshold = method.num_speculative_tokens, method.confidence_threshold
        self.counts = method.candidate_counts if method.dynamic_verification else (1,) * len(method.candidate_counts)
        self.greedy_only, coupled = method.rejection_sample_method is None, method.rejection_sample_method != "standard"
        super().__init__(model, rows, max_drafts=max_drafts, threshold=threshold, ranks=max(self.counts), coupled=coupled)
        self.max_leaves = max_leaves(max_drafts, threshold, self.counts)
        self.scratch_slots = max(max_drafts + self.max_leaves, method.context_window)
        self.optimisation, self.shortlist, self.gamma = optimisation, method.shortlist(model), method.context_window
        self.responses: list[list[int]] = [[] for _ in range(rows)]  # context accumulation (section 4.1.1)
        self._evaluation: tuple[LayerMask, Tensor] | None = None  # a set, and its number of correct tokens
        self._turn = 0  # number of evaluations so far; rows are used round-robin

    def describe(self, name: str) -> list[dict[str, Any]]:
        return [layers_used(name, skip=self.optimisation.skip)]

    def validate_request(self, request: Request) -> None:
        if self.greedy_only and (request.sampling.temperature > 0 or request.sampling.warpers):
            raise ValueError(
                "swift with rejection_sample_method=none, as in preset=release, decodes greedily only, because the sampling of "
                "the released code is not lossless: choose temperature 0, or add rejection_sample_method=standard"
            )

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.responses[row] = []

    def window(self, row: int) -> tuple[int, list[int]] | None:
        """1 + gamma tokens of a row's response that evaluate a set, and the place of the first; None if it is too short."""
        response, gamma = self.responses[row], self.gamma
        if self.optimisation.search.window == "first":  # the released code waits until the cache has more than 1 + gamma
            return (0, response[: 1 + gamma]) if len(response) - 1 > 1 + gamma else None
        return (len(response) - 1 - gamma, response[-1 - gamma :]) if len(response) > gamma else None

    def run_background_work(self) -> None:
        """An optimisation step (section 4.1.2): evaluate a candidate on tokens of one row's response (Eq. 3 and 4)."""
        if not self.optimisation.searching:
            return
        windows = {row: window for row, alive in enumerate(self.view.alive) if alive and (window := self.window(row))}
        if not windows or (candidate := self.optimisation.candidate()) is None:
            return
        self._turn += 1
        row = list(windows)[self._turn % len(windows)]
        first, tokens = windows[row]
        store, skip = self.view.store, self.optimisation.space.to_skip_set(candidate)
        end = store.length[row] - (len(self.responses[row]) - 1 - first - self.gamma)  # the last token is not in the store yet
        hidden = replay_hidden_states(store, row, tokens[:-1], self.model, self.model.depth, skip, end)
        predicted = self.model.logits(hidden, self.shortlist)[0].argmax(-1)  # [gamma]
        matched = (predicted == on_device(tokens[1:], self.model.device)).sum()
        self._evaluation = candidate, matched.to("cpu", non_blocking=True)

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """Section 4.2: a chain drafted with the layer set while it is confident, and its runners-up, as one tree."""
        chain, ranked = self.chain(limits, self.optimisation.skip)
        if ranked is None:
            return chain
        tree = with_leaves(chain, *ranked, self.counts, self.max_leaves)
        if tree.width == chain.width:
            return chain
        max_drafts = [tree.width if alive else 0 for alive in self.view.alive]
        tree.forward = self.view.start_forward(max_drafts, self.shortlist, self.drafting_model)
        tree.forward.append(tree.tokens, tree.valid, tree.parents)
        return tree

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().observe_commits(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            self.responses[row] += verdict.tokens
        if draft is not None and draft.width > 0:
            self.optimisation.drafted(verdicts)
        if self._evaluation is not None:  # its transfer is done, because the step's own transfer came later
            (candidate, matched), self._evaluation = self._evaluation, None
            self.optimisation.evaluated(candidate, float(matched.numpy()) / self.gamma, self.gamma)  # Eq. 4
