"""AdaSD: Adaptive Speculative Decoding for Efficient Language Model Inference
(Lu, Hong & Liu, 2025, arXiv 2512.11280), section 4, appendices A and B.

A draft model drafts until the entropy of its newest token is above that of the drafts that were rejected so far; the target
keeps a draft token where its distribution is near the draft model's, nearer than half-way between what was kept and what was
rejected so far, or else where the ordinary rule keeps it. Neither threshold is set by anyone.

The second threshold keeps tokens that the target would not have said: this method may change the text (`lossless` is False).
`relaxed=False` leaves it out and is exact (the paper's Gen-Only), `adaptive_length=False` leaves the first one out
(Verify-Only).

Our reading, where the paper is silent: what is far is judged by the ordinary rule; a threshold without data is none; the means
are a request's own; entropy and distance are of what processors leave, at temperature 1, before top-k and its kin.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.draft import Draft, RowVerdict, Verdict
from skipstone.decoding.method import OWN_FIELD
from skipstone.decoding.sampling import Scores
from skipstone.decoding.session import Request, Session
from skipstone.decoding.settings import setting, whole_number
from skipstone.decoding.verify import js_distances, spread
from skipstone.methods.adasd.thresholds import GenerationThreshold, Ledger, Variant, VerificationThreshold
from skipstone.methods.shared import states
from skipstone.methods.shared.draft_model import DraftModel
from skipstone.methods.shared.second_model import DraftingSession, Paired
from skipstone.models.layered import LayeredModel


@dataclass(frozen=True)
class AdaSD(Paired):
    """AdaSD: a draft model with two thresholds that set themselves."""

    name: ClassVar[str] = "adasd"

    max_window: int = setting(20, "most drafts a step.")
    relaxed: bool = setting(True, "keep drafts whose distribution is near the target's (section 4.4; lossy).")
    adaptive_length: bool = setting(True, "stop drafting at an uncertain token (section 4.3).")
    fixed_window: int = setting(5, "drafts a step without adaptive_length.")
    variant: Variant | None = setting(None, "A, B or C of appendix B, of how near is near enough.")

    @property
    def lossless(self) -> bool:
        return not self.relaxed

    @property
    def window(self) -> int:
        """Most drafts a step."""
        return self.max_window if self.adaptive_length else self.fixed_window

    def check(self, model: LayeredModel) -> None:
        for name in ("max_window", "fixed_window"):
            whole_number(name, getattr(self, name), 1)
        for name in ("relaxed", "adaptive_length"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be true or false, found {getattr(self, name)!r}")
        if self.variant not in (None, "A", "B", "C"):
            raise ValueError(f"variant must be A, B, C or none, found {self.variant!r}")
        if self.variant is not None and not self.relaxed:
            raise ValueError("a variant says how near is near enough: it goes with relaxed=True")
        super().check(model)

    def _key(self) -> tuple[AdaSD, Any]:
        """What the figures of all requests are kept under: nothing that would keep a model alive."""
        if isinstance(self.draft_model, PreTrainedModel):
            return replace(self, draft_model=None), weakref.ref(self.draft_model)
        return self, "by name"

    def report(self, model: PreTrainedModel) -> dict[str, Any]:
        method = self.completed(getattr(model.generation_config, OWN_FIELD, None))
        return states.known(*method._key(), model)

    def start(self, model: LayeredModel, rows: int, capacity: int) -> Session:
        own, more = self._key()
        ledger = states.of(own, model, rows, more, lambda: Ledger(model.device))
        return AdaSDSession(self, model, self.helper(model), rows, capacity, ledger)


class AdaSDSession(DraftingSession):
    """Drafts and verifies by thresholds that every row sets for itself. ledger: the figures of all requests, for reports."""

    def __init__(
        self, method: AdaSD, model: LayeredModel, helper: DraftModel, rows: int, capacity: int, ledger: Ledger
    ) -> None:
        super().__init__(model, helper, rows, capacity, coupled=method.rejection_sample_method == "coupled")
        self.method, self.ledger = method, ledger
        self.enough = GenerationThreshold(rows, model.device)
        self.near = VerificationThreshold(rows, model.device, method.variant)
        self._most_uncertain = self.enough.value
        self._said: list[Tensor] = []
        self._entropies: list[Tensor] = []
        self._distances: Tensor | None = None

    def admit(self, row: int, request: Request) -> None:
        super().admit(row, request)
        self.enough.reset(row)
        self.near.reset(row)

    def draft(self, limit: list[int]) -> Draft:
        """Generation: until a token is more uncertain than those that were rejected, or the window is full."""
        self._said, self._entropies, self._distances = [], [], None
        self._most_uncertain = self.enough.value
        return self.chain([min(self.method.window, allowed) for allowed in limit], self._observe)

    def _observe(self, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        q, entropy = spread(scores)
        if self.method.relaxed:
            self._said.append(q)
        self._entropies.append(entropy)
        return None, entropy <= self._most_uncertain if self.method.adaptive_length else None

    def waived(self, draft: Draft, scores: Scores) -> Tensor | None:
        """Verification: where the two distributions are near enough, the token stands, whatever it is."""
        if not self.method.relaxed or not draft.width:
            return None
        said, entropies = torch.stack(self._said, 1), torch.stack(self._entropies, 1)
        self._distances = js_distances(self._processed(draft, scores), said, entropies)
        return self._distances < self.near.value[:, None]

    def _processed(self, draft: Draft, scores: Scores) -> Tensor:
        """What the target says before every draft token, [B, n, V], after processors, which saw these texts while drafting."""
        raw = scores.logits[:, :-1]
        if not self.sampler.processed:
            return raw
        valid = draft.valid.tolist()
        places = [
            self.sampler.process(raw[:, place], draft.tokens[:, :place], [row[place] for row in valid])
            for place in range(draft.width)
        ]
        return torch.stack(places, 1)

    def verify(self, draft: Draft, scores: Scores) -> Verdict:
        verdict = super().verify(draft, scores)
        if draft.width:
            self._update(draft, verdict)
        return verdict

    def _update(self, draft: Draft, verdict: Verdict) -> None:
        """Update: what was accepted, and the first that was not; what follows counts in neither."""
        place, end = torch.arange(draft.width, device=draft.tokens.device), verdict.accepted[:, None]
        accepted, rejected = place < end, (place == end) & draft.valid
        if self._distances is not None:
            self.ledger.distances(self._distances, accepted, rejected, self.near.value)
            self.near.add(self._distances, accepted, rejected)
        entropies = torch.stack(self._entropies, 1)
        self.ledger.entropies(entropies, accepted, rejected, self.enough.value)
        self.enough.add(entropies, rejected)

    def commit(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().commit(draft, verdicts)
        if draft is not None:
            self.ledger.add(verdicts)
