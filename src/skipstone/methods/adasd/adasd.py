"""AdaSD: Adaptive Speculative Decoding for Efficient Language Model Inference
(Lu, Hong & Liu, 2025, arXiv 2512.11280), section 4, appendices A and B.

Two thresholds adapt to the text. Generation: a draft model drafts until a token's entropy exceeds the mean entropy of the
drafts rejected so far. Verification: the target accepts a draft if the Jensen-Shannon distance of the two distributions is
below the middle between the mean distances of accepted and of rejected drafts.

Verification by distance may change the text (`lossless` is False). `relaxed=False` disables it and is exact (the paper's
Gen-Only). `adaptive_length=False` disables the first threshold (Verify-Only).

Our reading where the paper is silent: the ordinary rule decides on drafts above the second threshold. Without data there is no
threshold. Each request has its own means. Entropy and distance are of processed logits at temperature 1, before the warpers.
"""

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from skipstone.decoding import method_states
from skipstone.decoding.draft import Draft, GreedyVerdict, RowVerdict, Verdict
from skipstone.decoding.drafter import Drafter
from skipstone.decoding.method import Preset
from skipstone.decoding.request import Request
from skipstone.decoding.sampling import Scores
from skipstone.decoding.settings import setting
from skipstone.decoding.verify import js_distances, spread
from skipstone.engines.engine import ChainInputs, ChainOutputs, SurvivalThresholds
from skipstone.engines.host_transfer import on_device, to_device
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.adasd.thresholds import AdaSDCounts, GenerationThreshold, Variant, VerificationThreshold
from skipstone.methods.drafting.chain import DraftChain
from skipstone.methods.drafting.draft_model import DraftModel, DraftModelDrafter, DraftModelMethod
from skipstone.models.generation_config import OWN_FIELD
from skipstone.models.passes import SkipSet

MAX_WINDOW = 20
"""Maximum number of drafts a step with the generation threshold (appendix A)."""
FIXED_WINDOW = 5
"""Number of drafts a step without it (section 5.3)."""


def _preset(where: str, *, relaxed: bool, adaptive_length: bool) -> Preset:
    """One of the paper's rows."""
    settings: dict[str, Any] = {"relaxed": relaxed, "adaptive_length": adaptive_length, "variant": None}
    settings["num_speculative_tokens"] = MAX_WINDOW if adaptive_length else FIXED_WINDOW
    return Preset(f"Lu et al., {where}", {**settings, "rejection_sample_method": "standard"})


@dataclass(frozen=True)
class AdaSD(DraftModelMethod):
    """AdaSD: a draft model with two adaptive thresholds."""

    name: ClassVar[str] = "adasd"
    aliases: ClassVar[dict[str, str]] = DraftModelMethod.aliases | {
        "max_window": "num_speculative_tokens",
        "fixed_window": "num_speculative_tokens",
    }

    presets: ClassVar[dict[str, Preset]] = {
        "paper": _preset("sections 4.3 and 4.4, appendix A", relaxed=True, adaptive_length=True),
        "gen-only": _preset("section 5.2, Gen-Only", relaxed=False, adaptive_length=True),
        "verify-only": _preset("sections 5.2 and 5.3, Verify-Only", relaxed=True, adaptive_length=False),
    }

    num_speculative_tokens: int | None = setting(
        None, f"maximum drafts a step; none: {MAX_WINDOW}, or {FIXED_WINDOW} without adaptive_length."
    )
    relaxed: bool = setting(True, "accept drafts with a distribution near the target's (section 4.4; lossy).")
    adaptive_length: bool = setting(True, "stop drafting at an uncertain token (section 4.3).")
    variant: Variant | None = setting(None, "A, B or C: a definition of the verification threshold in appendix B.")

    @property
    def lossless(self) -> bool:
        return not self.relaxed

    @property
    def window(self) -> int:
        """Maximum number of drafts a step."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return MAX_WINDOW if self.adaptive_length else FIXED_WINDOW

    @classmethod
    def renamed(cls, *sources: Mapping[str, Any]) -> dict[str, Any]:
        """As in `Method`. `max_window` needs adaptive_length, `fixed_window` its absence; otherwise they are ignored."""
        every = list(cls.with_presets(*sources))
        adaptive = {key: value for source in every for key, value in source.items()}.get("adaptive_length", True)
        ignored = "fixed_window" if adaptive else "max_window"
        return super().renamed(*({key: value for key, value in source.items() if key != ignored} for source in every))

    def check(self, model: ModelRunner) -> None:
        if self.variant is not None and not self.relaxed:
            raise ValueError("a variant defines the verification threshold: it goes with relaxed=True")
        super().check(model)

    def _key(self) -> "tuple[AdaSD, Any]":
        """The key of this method's counts. It must not keep a draft model alive."""
        if isinstance(self.draft_model, nn.Module):
            return replace(self, draft_model=None), weakref.ref(self.draft_model)
        return self, "by name"

    def report(self, model: Any) -> dict[str, Any]:
        method = self.completed(getattr(model.generation_config, OWN_FIELD, None))
        return method_states.method_report(*method._key(), model)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        key, draft_model = self._key()
        counts = method_states.method_state(key, model, rows, draft_model, AdaSDCounts)
        return AdaSDDrafter(self, model, self.draft_model_for(model), rows, capacity, counts)


class AdaSDDrafter(DraftModelDrafter):
    """Drafts and verifies by adaptive thresholds of every row. counts: of all requests, for reports."""

    def __init__(
        self, method: AdaSD, model: ModelRunner, draft_model: DraftModel, rows: int, capacity: int, counts: AdaSDCounts
    ) -> None:
        super().__init__(method, model, draft_model, rows, capacity, method.window, None)
        self.method, self.counts = method, counts
        self.generation = [GenerationThreshold() for _ in range(rows)]
        self.verification = [VerificationThreshold(method.variant) for _ in range(rows)]
        # of this step
        self._entropy_limits: list[float] = []  # one per row
        self._of_places: list[tuple[Tensor, Tensor]] = []  # one (distribution [B, V], entropy [B]) per place, processed
        self._distributions: Tensor | None = None  # [B, n, V], the draft model's, processed, at temperature 1
        self._entropies: Tensor | None = None  # [B, n], in bits
        self._distances: Tensor | None = None  # [B, n], between draft model and target

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.generation[row], self.verification[row] = GenerationThreshold(), VerificationThreshold(self.method.variant)

    @property
    def text_depends_on_drafts(self) -> bool:
        return self.method.relaxed or super().text_depends_on_drafts

    def needs_logits(self, draft: Draft) -> bool:
        return self.method.relaxed

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        """Generation: draft until a token's entropy is above the threshold or the window is full."""
        self._of_places, self._distributions, self._entropies, self._distances = [], None, None, None
        self._entropy_limits = [row.value if self.method.adaptive_length else math.inf for row in self.generation]
        return super().propose_draft(limits, stop_rule)

    def observe(self, scores: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Keep distribution and entropy. A row drafts on while its entropy is within the limit."""
        distribution, entropy = spread(scores)
        self._of_places.append((distribution, entropy))
        if not self.method.adaptive_length:
            return None, None
        return None, entropy <= on_device(self._entropy_limits, entropy.device, torch.float64)

    def finish(self, chain: DraftChain, forward: PartialForward) -> Draft:
        if self._of_places:
            distributions, entropies = zip(*self._of_places, strict=True)
            self._distributions = torch.stack(distributions, 1) if self.method.relaxed else None
            self._entropies = torch.stack(entropies, 1)
        return super().finish(chain, forward)

    def chain_inputs(self, max_drafts: list[int], layers: int, skip: SkipSet | None) -> ChainInputs:
        """As in `ChainDrafter`, with the generation threshold."""
        inputs = super().chain_inputs(max_drafts, layers, skip)
        inputs.max_entropy = self._entropy_limits
        inputs.distribution_size = self.model.head.weight.shape[0] if self.method.relaxed else 0
        return inputs

    def observe_chain(self, chain: ChainOutputs) -> None:
        assert chain.entropy is not None, "the chain had an entropy limit"
        self._entropies = to_device(chain.entropy, self.model.device)
        if chain.distributions is not None:
            self._distributions = to_device(chain.distributions, self.model.device)

    def waive_tokens(self, draft: Draft, scores: Scores) -> Tensor | None:
        """Verification: draft tokens [B, n] bool with similar distributions, which are accepted unconditionally."""
        if self._distributions is None or self._entropies is None or not draft.width:
            return None
        logits = self._processed_target_logits(draft, scores)
        self._distances = js_distances(logits, self._distributions, self._entropies).nan_to_num(1.0)
        thresholds = on_device([row.value for row in self.verification], self._distances.device, torch.float64)
        return self._distances < thresholds[:, None]

    def _processed_target_logits(self, draft: Draft, scores: Scores) -> Tensor:
        """The target's processed logits before every draft token, [B, n, V]."""
        raw = scores.logits[:, :-1]
        if not self.sampler.processed:
            return raw
        valid = draft.valid.tolist()
        places = [
            self.sampler.process(raw[:, place], draft.tokens[:, :place], [row[place] for row in valid])
            for place in range(draft.width)
        ]
        return torch.stack(places, 1)

    def observe_scores(self, draft: Draft, scores: Scores, verdict: Verdict | GreedyVerdict) -> Tensor | None:
        """Entropies and distances for `observe_commits`: the bits of float64."""
        if self._entropies is None or not draft.width:
            return None
        figures = [self._entropies] if self._distances is None else [self._entropies, self._distances]
        return torch.cat(figures, 1).double().view(torch.int64)

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().observe_commits(draft, verdicts)
        if draft is None:
            return
        self.counts.add(verdicts)
        for row, verdict in enumerate(verdicts):
            if verdict.notes:
                figures = np.array(verdict.notes, dtype=np.int64).view(np.float64).tolist()
                self._update_thresholds(row, verdict, figures[: draft.width], figures[draft.width :])

    def _update_thresholds(self, row: int, verdict: RowVerdict, entropies: list[float], distances: list[float]) -> None:
        """Update a row's thresholds with its accepted tokens and the first rejected one. Later tokens do not count."""
        end = len(verdict.path)
        rejected = slice(end, end + (verdict.final == "recovered" and len(verdict.tokens) > end))
        generation, verification = self.generation[row], self.verification[row]
        if distances:
            threshold = verification.value
            self.counts.add_means("distance", distances[:end], distances[rejected], threshold, threshold > 0)
            verification.add(distances[:end], distances[rejected])
        threshold = generation.value
        self.counts.add_means("entropy", entropies[:end], entropies[rejected], threshold, math.isfinite(threshold))
        generation.add(entropies[rejected])
