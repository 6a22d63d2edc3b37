"""SWIFT's settings and their checks."""

from dataclasses import dataclass
from typing import ClassVar

from skipstone.decoding.settings import setting
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.chain_stop_rule import Threshold
from skipstone.methods.drafting.layer_sets import LayerSetSpace, load_profile
from skipstone.methods.drafting.shortlist import ShortlistMethod, vocabulary_setting
from skipstone.methods.swift.layer_set_search import SearchName


@dataclass(frozen=True)
class SwiftSettings(ShortlistMethod):
    """The paper's hyper-parameters (appendix B.2) and a choice of searches."""

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
    draft_vocabulary: int | str | None = vocabulary_setting()

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
        self.shortlist(model)
