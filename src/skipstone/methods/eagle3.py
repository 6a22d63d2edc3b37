"""EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test
(Li et al., 2025, arXiv 2503.01840), section 3.1.

A head of one decoder layer drafts. It reads states of a low, a middle and a high layer of the target, next to the embeddings of
the tokens that follow them. For further drafts it reads its own output in their place. Released heads come in EAGLE's own
layout and in that of the `speculators` package (`models/eagle3.py`).

Deviation: drafts are chains, not trees.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from skipstone.decoding.settings import setting, whole_numbers
from skipstone.engines.eagle3_head import Eagle3Head, load_eagle3
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.candidates import FewerBits
from skipstone.methods.drafting.feature_drafter import FeatureMethod
from skipstone.models.per_model_cache import PerModelCache
from skipstone.utils.setup_times import setup_work

_LOADED: PerModelCache[Eagle3Head] = PerModelCache()


@dataclass(frozen=True)
class Eagle3(FeatureMethod):
    """Drafting with an EAGLE-3 head."""

    name: ClassVar[str] = "eagle3"
    by_model: ClassVar[tuple[str, ...]] = ("head",)
    if_few_accepted: ClassVar[str] = (
        "An acceptance rate that low says that the head was trained for another model or chat template, or reads other layers "
        "(`feature_layers`)."
    )

    head: str | None = setting(None, "a folder or a hub id of an EAGLE-3 head for this model.")
    feature_layers: tuple[int, ...] | None = setting(
        None, "after how many layers of the model the head reads its states; none: as its config says.", kw_only=True
    )
    norm_before_residual: bool | None = setting(None, "replaces the setting in the head's config.json.", kw_only=True)
    feedback: Literal["raw", "normed"] | None = setting(
        None, "the state before or after the final norm goes into the next draft; none: by the head's config.", kw_only=True
    )
    head_quantize: FewerBits | None = setting(
        None, "int8 or int4: quantise the head in the native engine; none: as the model.", kw_only=True
    )

    def check(self, model: ModelRunner) -> None:
        if self.feature_layers is not None:
            whole_numbers("feature_layers", self.feature_layers)
        super().check(model)

    def head_for(self, target: ModelRunner) -> Eagle3Head:
        if self.head is None:
            raise ValueError("eagle3 needs head=, a folder or a hub id of an EAGLE-3 head; a server has it in its --method")
        layers = None if self.feature_layers is None else whole_numbers("feature_layers", self.feature_layers)
        own = str(self.head), layers, self.norm_before_residual, self.feedback, self.head_quantize
        key = *own, str(target.device), target.weight_dtype, target.engine_options.for_drafts
        return _LOADED.get(target.model, key, lambda: self._load(target), lambda head: head.fits(target))

    def notes(self, model: ModelRunner) -> list[str]:
        return [f"EAGLE-3 head, extra memory: {self.head_for(model).nbytes / 1e6:.1f} MB"]

    @setup_work("draft head")
    def _load(self, target: ModelRunner) -> Eagle3Head:
        assert self.head is not None
        return load_eagle3(
            self.head,
            target,
            layers=None if self.feature_layers is None else whole_numbers("feature_layers", self.feature_layers),
            norm_before_residual=self.norm_before_residual,
            norm_output=None if self.feedback is None else self.feedback == "normed",
            quantize=self.head_quantize,
        )
