"""Fast Inference from Transformers via Speculative Decoding
(Leviathan, Kalman & Matias, ICML 2023, arXiv 2211.17192), Algorithm 1.

A smaller model with the same vocabulary drafts token by token. The target scores the whole draft in one pass and verifies it
(`decoding/verify.py`). The draft model has its own keys and values at the same positions.

`schedule="constant"` with five tokens is AdaSD's baseline "Vanilla". "heuristic" is transformers' schedule: two more tokens
after a fully accepted draft, one fewer after others. "confidence" stops after a token with low confidence, as transformers'
assisted generation does.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.method import Preset
from skipstone.decoding.request import Request
from skipstone.decoding.settings import setting
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.candidates import size_ratio
from skipstone.methods.drafting.chain_stop_rule import Threshold
from skipstone.methods.drafting.draft_model import DraftModel, DraftModelDrafter, DraftModelMethod
from skipstone.policy.draft_length import MAX_DRAFTS

Schedule = Literal["constant", "heuristic", "confidence"]
MORE = 2  # heuristic schedule: additional draft tokens after a fully accepted draft
FEWER = 1  # heuristic schedule: fewer draft tokens after any other draft
CONFIDENCE_THRESHOLD = 0.4  # transformers' `assistant_confidence_threshold`


@dataclass(frozen=True)
class Speculative(DraftModelMethod):
    """Speculative decoding with a draft model."""

    name: ClassVar[str] = "speculative"
    aliases: ClassVar[dict[str, str]] = DraftModelMethod.aliases | {
        "num_assistant_tokens": "num_speculative_tokens",
        "num_assistant_tokens_schedule": "schedule",
        "assistant_confidence_threshold": "confidence_threshold",
    }
    presets: ClassVar[dict[str, Preset]] = {
        "vanilla": Preset(
            "Vanilla of AdaSD's section 5.1 (Lu et al.)",
            {"num_speculative_tokens": 5, "schedule": "constant", "rejection_sample_method": "standard"},
        ),
        "assistedgen": Preset(
            "AssistedGen of the same section: transformers' defaults. With scikit-learn its threshold adapts, which this one "
            "does not. Sampled, it looks at the drawn token, and this one at the likeliest",
            {
                "num_speculative_tokens": 20,
                "schedule": "confidence",
                "confidence_threshold": CONFIDENCE_THRESHOLD,
                "rejection_sample_method": "standard",
            },
        ),
    }

    num_speculative_tokens: int = setting(5, "drafts a step; with the heuristic schedule, drafts of the first step.")
    schedule: Schedule = setting("constant", "constant, heuristic or confidence.")
    confidence_threshold: Threshold = setting(
        None, "for the confidence schedule: stop after a draft whose probability is below it; none: 0.4.", within=(0, 1)
    )

    def check(self, model: ModelRunner) -> None:
        if self.confidence_threshold is not None and self.schedule != "confidence":
            raise ValueError(f'confidence_threshold goes with schedule="confidence", found schedule="{self.schedule}"')
        super().check(model)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return SpeculativeDrafter(self, model, self.draft_model_for(model), rows, capacity)

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """One candidate. It drafts chains, and `auto` decides their length."""
        draft_model, coupled = self.draft_model_for(model), replace(self, rejection_sample_method="coupled")
        drafter = DraftModelDrafter(coupled, model, draft_model, rows, capacity, MAX_DRAFTS, None)
        ratio = size_ratio(draft_model, model)
        return {"speculative": Candidate(drafter, lambda: draft_model.fingerprint, ratio, ratio)}


class SpeculativeDrafter(DraftModelDrafter):
    """Drafts chains with the draft model (lines 1 to 5). The schedule decides their length."""

    def __init__(self, method: Speculative, model: ModelRunner, draft_model: DraftModel, rows: int, capacity: int) -> None:
        threshold = None
        if method.schedule == "confidence":
            threshold = CONFIDENCE_THRESHOLD if method.confidence_threshold is None else method.confidence_threshold
        super().__init__(method, model, draft_model, rows, capacity, method.num_speculative_tokens, threshold)
        self.method, self.checks_for_stops = (
            method,
            threshold is not None,
        )  # without a threshold only the end of a text stops a row

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.max_drafts[row] = self.method.num_speculative_tokens

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().observe_commits(draft, verdicts)
        if self.method.schedule == "heuristic":
            for row, verdict in enumerate(verdicts):
                if verdict.draft_steps:
                    accepted_all = len(verdict.path) == verdict.drafted
                    self.max_drafts[row] = max(1, self.max_drafts[row] + (MORE if accepted_all else -FEWER))
