"""Fast Inference from Transformers via Speculative Decoding
(Leviathan, Kalman & Matias, ICML 2023, arXiv 2211.17192), Algorithm 1.

A smaller model with the same vocabulary drafts token by token; the target scores the whole draft in one pass and keeps what its
own distribution bears (`decoding/verify.py`). The draft model keeps its own keys and values at the same positions.

`schedule="constant"` with five tokens is AdaSD's baseline "Vanilla"; "heuristic" is transformers' schedule (two more after a
draft that was accepted whole, one fewer after any other); "confidence" stops after a token that the draft model is unsure of,
as transformers' assisted generation does.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.request import Request
from skipstone.decoding.settings import setting
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.candidates import size_ratio
from skipstone.methods.drafting.confidence import Threshold
from skipstone.methods.drafting.draft_model import DraftModel, DraftModelDrafter, DraftModelMethod
from skipstone.policy.draft_length import MAX_DRAFTS

Schedule = Literal["constant", "heuristic", "confidence"]
MORE = 2  # draft tokens that the heuristic schedule adds after a draft that was accepted whole
FEWER = 1  # draft tokens that it takes away after any other
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

    num_speculative_tokens: int = setting(5, "drafts a step; with the heuristic schedule, of the first.")
    schedule: Schedule = setting("constant", "constant, heuristic or confidence.")
    confidence_threshold: Threshold = setting(
        None,
        "of the confidence schedule, stop where the most probable token has less than it; 0.4 where none is given.",
        within=(0, 1),
    )

    def check(self, model: ModelRunner) -> None:
        if self.confidence_threshold is not None and self.schedule != "confidence":
            raise ValueError(f'confidence_threshold goes with schedule="confidence", found schedule="{self.schedule}"')
        super().check(model)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return SpeculativeDrafter(self, model, self.draft_model_for(model), rows, capacity)

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """Chains. `auto` decides their length."""
        draft_model, coupled = self.draft_model_for(model), replace(self, rejection_sample_method="coupled")
        drafter = DraftModelDrafter(coupled, model, draft_model, rows, capacity, MAX_DRAFTS, None)
        ratio = size_ratio(draft_model, model)
        return {"speculative": Candidate(drafter, lambda: draft_model.fingerprint, ratio, ratio)}


class SpeculativeDrafter(DraftModelDrafter):
    """Chains of the draft model (lines 1 to 5), as long as the schedule says."""

    def __init__(self, method: Speculative, model: ModelRunner, draft_model: DraftModel, rows: int, capacity: int) -> None:
        threshold = None
        if method.schedule == "confidence":
            threshold = CONFIDENCE_THRESHOLD if method.confidence_threshold is None else method.confidence_threshold
        super().__init__(method, model, draft_model, rows, capacity, method.num_speculative_tokens, threshold)
        self.method, self.looks = method, threshold is not None  # without one only an end of the text stops a row

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.max_drafts[row] = self.method.num_speculative_tokens

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().observe_commits(draft, verdicts)
        if self.method.schedule == "heuristic":
            for row, verdict in enumerate(verdicts):
                if verdict.draft_steps:
                    accepted_whole = len(verdict.path) == verdict.drafted
                    self.max_drafts[row] = (
                        self.max_drafts[row] + MORE if accepted_whole else max(1, self.max_drafts[row] - FEWER)
                    )
