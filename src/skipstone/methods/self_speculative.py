"""Draft & Verify: Lossless Large Language Model Acceleration via Self-Speculative Decoding
(Zhang et al., ACL 2024, arXiv 2309.08168), sections 3.1 to 3.3.

The target drafts without a fixed set of its sublayers until confidence is low, and verifies the chain in one pass.
`skipstone search` finds such a set in advance.

Deviations: drafts are coupled to the target's noise, and `match` verifies them at every temperature (the released code treats a
greedy draft as drawn). Every request starts with the initial threshold (the released notebooks go on with the last prompt's).
With `draft_quantize` the remaining layers draft in fewer bits, over the target's keys and values. Then the set may be empty,
and no search is needed.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.method import Preset
from skipstone.decoding.settings import setting, whole_numbers
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.candidates import FewerBits, layer_candidate
from skipstone.methods.drafting.chain_stop_rule import Threshold
from skipstone.methods.drafting.layer_sets import LayerSetSpace, load_profile
from skipstone.methods.drafting.shortlist import ShortlistMethod
from skipstone.methods.drafting.sublayer_skipping import SkippingDrafter
from skipstone.models.passes import SkipSet
from skipstone.policy.draft_length import MAX_DRAFTS


@dataclass(frozen=True)
class SelfSpeculative(ShortlistMethod):
    """Draft & Verify: the target drafts without a fixed set of sublayers, or in fewer bits."""

    name: ClassVar[str] = "self_speculative"
    positional: ClassVar[str] = "leaves sublayers out"
    aliases: ClassVar[dict[str, str]] = {
        "num_assistant_tokens": "num_speculative_tokens",
        "stop_threshold": "confidence_threshold",
    }
    presets: ClassVar[dict[str, Preset]] = {
        "paper": Preset(
            "Zhang et al., section 3.3, K = 12; from the notebooks of the released code: gamma starts at .6",
            {"num_speculative_tokens": 12, "confidence_threshold": "adaptive", "initial_threshold": 0.6},
        ),
        "release": Preset(
            "dilab-zju/self-speculative-decoding at f69f2a7: defaults of exact_self_speculative_generate",
            {"num_speculative_tokens": 8, "confidence_threshold": "adaptive", "initial_threshold": 0.8},
        ),
        "adadecode": Preset(
            "the baseline of AdaDecode (Wei et al., arXiv 2506.03700, appendix C); its layer sets are of "
            "`skipstone search --search bayesian --iterations 200` on 4 prompts of the task",
            {"num_speculative_tokens": 12, "confidence_threshold": "adaptive", "initial_threshold": 0.6},
        ),
    }
    if_few_accepted: ClassVar[str] = (
        "An acceptance rate that low says that the layer set or the few bits do not suit the model or the text."
    )

    skip_attention: tuple[int, ...] = setting(
        (), "layers without attention in drafting, counted from 0; not the first or the last."
    )
    skip_mlp: tuple[int, ...] = setting((), "the same for MLPs.")
    profile: str | None = setting(None, "a file of `skipstone search`, or a hub id, instead of the two.")
    num_speculative_tokens: int = setting(12, "maximum drafts a step.")
    confidence_threshold: Threshold = setting(
        "adaptive",
        'stop after a draft whose probability is below it; "adaptive" is the paper\'s rule (section 3.3).',
        within=(0, 1),
    )
    initial_threshold: float = setting(0.6, "gamma 0, the adaptive threshold of a new request.", within=(0, 1), kw_only=True)
    draft_quantize: FewerBits | None = setting(
        None,
        "int8 or int4: drafts with a copy of the weights that the native engine quantises; without a set, of all layers.",
        kw_only=True,
    )

    def __post_init__(self) -> None:
        for name in ("skip_attention", "skip_mlp"):
            object.__setattr__(self, name, whole_numbers(name, getattr(self, name)))

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        if (skip := self.skip_set(model)).attention or skip.mlp:
            LayerSetSpace.of(model).from_skip_set(skip)
        self.drafting_model(model)

    def skip_set(self, model: ModelRunner) -> SkipSet:
        """The layer set, empty if all layers draft. ValueError if none or two are given."""
        given = SkipSet(frozenset(self.skip_attention), frozenset(self.skip_mlp))
        if self.profile is not None:
            if given.attention or given.mlp:
                raise ValueError("give either a profile or skip_attention and skip_mlp")
            return load_profile(self.profile, model.model).skip
        if not given.attention and not given.mlp and self.draft_quantize is None:
            raise ValueError(
                "no layer set is given: name skip_attention and skip_mlp, or a profile (`skipstone search MODEL` finds one), "
                "or let all layers draft in fewer bits (draft_quantize=int4)"
            )
        return given

    def drafting_model(self, model: ModelRunner) -> ModelRunner | None:
        """The quantised target that drafts; None for the target itself. ValueError if the engine cannot quantise it."""
        if self.draft_quantize is None:
            return None
        if model.engine.name != "native":
            why = f": {model.engine_reason}" if model.engine_reason else ""
            raise ValueError(
                f"draft_quantize={self.draft_quantize} needs the native engine, and this model runs on the "
                f"{model.engine.name} one{why}"
            )
        if model.engine.quantize is not None:
            raise ValueError(
                f"draft_quantize={self.draft_quantize} drafts with fewer bits than the model, which is "
                f"quantised to {model.engine.quantize} already: leave one of the two out"
            )
        return model.in_fewer_bits(self.draft_quantize)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        """A drafter of chains with one layer set (stage 1 of section 3.1)."""
        drafter = SkippingDrafter(model, rows, max_drafts=self.num_speculative_tokens, threshold=self.confidence_threshold)
        drafter.confidence.initial_threshold = self.initial_threshold
        drafter.skip, drafter.shortlist = self.skip_set(model), self.shortlist(model)
        drafter.drafting_model = self.drafting_model(model)
        return drafter

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """One candidate. It drafts chains, and `auto` decides their length."""
        chain, skip = replace(self, num_speculative_tokens=MAX_DRAFTS, confidence_threshold=None), self.skip_set(model)
        skipped, name = [sorted(skip.attention), sorted(skip.mlp)], "self_speculative"
        drafter, layers = chain.create_drafter(model, rows, capacity), model.depth - sum(map(len, skipped)) / 2
        candidate = layer_candidate(drafter, chain, model, layers, skipped, bits=self.draft_quantize or "")
        return {name if self.draft_quantize is None else f"{name}, {self.draft_quantize}": candidate}
