"""When a chain of drafts stops: by a fixed or adaptive confidence threshold, or by survival probability."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from skipstone.decoding.draft import RowVerdict
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.host_transfer import on_device
from skipstone.policy.draft_length import NEVER

Threshold = float | Literal["adaptive"] | None
"""A number in [0, 1]; "adaptive" for a number per row that follows the acceptance rate; None never stops drafting."""


class ConfidenceRule:
    """Stops drafting after a token if the top probability of its distribution is below a threshold.

    The adaptive rule is that of Draft & Verify (arXiv 2309.08168, section 3.3; constants of its released code). max_drafts:
    maximum number of draft tokens a step.
    """

    survival: SurvivalThresholds | None = None  # a further stop rule
    joint = False  # whether `together` applies

    initial_threshold = 0.6  # of a new request, if it is adaptive
    TARGET_RATE = 0.9  # desired acceptance rate
    STEP = 0.01  # change of the threshold after a step, before smoothing
    SMOOTH_RATE = 0.5  # share of the old acceptance rate in the new one
    SMOOTH_THRESHOLD = 0.9  # share of the old threshold in the new one

    def __init__(self, threshold: Threshold, rows: int, device: torch.device, max_drafts: int) -> None:
        self.active = threshold is not None
        self.adaptive = threshold == "adaptive"
        self.max_drafts = max_drafts
        first = self.initial_threshold if threshold is None or threshold == "adaptive" else threshold
        self.thresholds = [first] * rows
        self._acceptance_rates = [0.0] * rows
        self._device = device
        self._thresholds_on_device: Tensor | None = None  # [B], None if they are out of date

    def reset(self, row: int) -> None:
        """Reset a row for a new request, so that earlier requests do not change its text."""
        if self.adaptive:
            self.thresholds[row], self._acceptance_rates[row] = self.initial_threshold, 0.0
            self._thresholds_on_device = None

    def of(self, scores: Tensor) -> Tensor | None:
        """Top probability [B] at temperature 1 of processed, unwarped logits [B, V]; None without a threshold."""
        return scores.softmax(-1).amax(-1) if self.active else None

    def keep(self, confidence: Tensor | None) -> Tensor | None:
        """Rows [B] bool with enough confidence to draft on; None for all."""
        if confidence is None or not self.active:
            return None
        if self._thresholds_on_device is None:
            self._thresholds_on_device = on_device(self.thresholds, self._device, torch.float32)
        return confidence >= self._thresholds_on_device

    def together(self, going: Tensor) -> Tensor:
        """For a joint rule: rows [B] bool that may draft on. going: [B] bool, rows that draft on by `keep`."""
        raise NotImplementedError

    def update(self, verdicts: list[RowVerdict]) -> None:
        """Adapt every row's threshold to its verdict."""
        if not self.adaptive:
            return
        for row, verdict in enumerate(verdicts):
            if not verdict.draft_steps:
                continue
            rate = self.SMOOTH_RATE * self._acceptance_rates[row]
            rate += (1 - self.SMOOTH_RATE) * len(verdict.path) / verdict.draft_steps
            old = self.thresholds[row]
            step = self.STEP if rate < self.TARGET_RATE else 0.0 if verdict.draft_steps == self.max_drafts else -self.STEP
            self._acceptance_rates[row] = rate
            moved = self.SMOOTH_THRESHOLD * old + (1 - self.SMOOTH_THRESHOLD) * (old + step)
            self.thresholds[row] = min(max(moved, 0.0), 1.0)
        self._thresholds_on_device = None


class SurvivalRule(ConfidenceRule):
    """Drafts on, within one step of the loop, while the survival probability is above `policy.draft_length.stop_thresholds`.

    rows: batch size. alive: number of rows that decode.
    """

    def __init__(self, survival: SurvivalThresholds, rows: int, alive: int, device: torch.device) -> None:
        super().__init__(0.0, rows, device, 0)
        self.survival = self._rule = survival
        self.joint = bool(survival.min_survival_shared)
        self._survived: Tensor | None = None  # [B], survival of all drafts so far
        self._place, self._rows = 0, alive

    def keep(self, confidence: Tensor | None) -> Tensor | None:
        assert confidence is not None
        rule, place = self._rule, self._place
        accepted = (rule.slope * confidence.clamp(3e-4, 1 - 3e-4).logit() + rule.offset).sigmoid()  # [B]
        self._survived, self._place = accepted if self._survived is None else self._survived * accepted, place + 1
        return self._survived >= _at(rule.min_survival_shared or rule.min_survival, place)

    def together(self, going: Tensor) -> Tensor:
        """All rows if together they pay for a draft step, else none."""
        assert self._survived is not None
        place = self._place - 1
        min_survival, min_survival_shared = _at(self._rule.min_survival, place), _at(self._rule.min_survival_shared, place)
        excess = torch.where(going, self._survived - min_survival_shared, 0.0).sum()
        return (excess >= self._rows * (min_survival - min_survival_shared)).expand_as(going)


def _at(survivals: Sequence[float], place: int) -> float:
    return survivals[place] if place < len(survivals) else NEVER
