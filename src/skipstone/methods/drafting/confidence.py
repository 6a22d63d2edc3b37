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
"""A number in [0, 1]; "adaptive", one per row that follows the share of accepted drafts; None never stops drafting."""


class ConfidenceRule:
    """Stops drafting after a token whose distribution has its top probability below a threshold.

    The adaptive rule is that of Draft & Verify (arXiv 2309.08168, section 3.3; constants of its released code). max_drafts:
    most draft tokens a step.
    """

    survival: SurvivalThresholds | None = None  # what a row stops by as well
    joint = False  # whether rows also stop together, as `together` says

    FIRST = 0.6  # threshold of a new request
    TARGET = 0.9  # share of accepted drafts that the threshold is steered to; also what a new request is thought to have
    STEP = 0.01  # how far the threshold wants to move after a step
    SMOOTH_RATE = 0.5  # share of the old acceptance rate in the new one
    SMOOTH_THRESHOLD = 0.9  # share of the old threshold in the new one

    def __init__(self, threshold: Threshold, rows: int, device: torch.device, max_drafts: int) -> None:
        self.active = threshold is not None
        self.adaptive = threshold == "adaptive"
        self.max_drafts = max_drafts
        first = self.FIRST if threshold is None or threshold == "adaptive" else threshold
        self.thresholds = [first] * rows
        self._acceptance_rates = [self.TARGET] * rows
        self._device = device
        self._known_there: Tensor | None = None  # the thresholds [B], once they are asked for

    def reset(self, row: int) -> None:
        """A new request starts on the row: nothing is carried over, so its text does not depend on what ran before."""
        if self.adaptive:
            self.thresholds[row], self._acceptance_rates[row] = self.FIRST, self.TARGET
            self._known_there = None

    def of(self, scores: Tensor) -> Tensor | None:
        """Top probability [B] at temperature 1 of processed, unwarped logits [B, V]; None where there is no threshold."""
        return scores.softmax(-1).amax(-1) if self.active else None

    def keep(self, confidence: Tensor | None) -> Tensor | None:
        """Rows [B] bool that are sure enough to draft on; None where all are."""
        if confidence is None or not self.active:
            return None
        if self._known_there is None:
            self._known_there = on_device(self.thresholds, self._device, torch.float32)
        return confidence >= self._known_there

    def together(self, going: Tensor) -> Tensor:
        """Where `joint`: rows [B] bool that may draft on as far as all of them are concerned. going: [B] bool, those that
        would draft on by themselves."""
        raise NotImplementedError

    def update(self, verdicts: list[RowVerdict]) -> None:
        """Move every row's threshold by what became of its draft."""
        if not self.adaptive:
            return
        for row, verdict in enumerate(verdicts):
            if not verdict.draft_steps:
                continue
            rate = self.SMOOTH_RATE * self._acceptance_rates[row]
            rate += (1 - self.SMOOTH_RATE) * len(verdict.path) / verdict.draft_steps
            old = self.thresholds[row]
            step = self.STEP if rate < self.TARGET else 0.0 if verdict.draft_steps == self.max_drafts else -self.STEP
            self._acceptance_rates[row] = rate
            moved = self.SMOOTH_THRESHOLD * old + (1 - self.SMOOTH_THRESHOLD) * (old + step)
            self.thresholds[row] = min(max(moved, 0.0), 1.0)
        self._known_there = None


class SurvivalRule(ConfidenceRule):
    """Drafting goes on while its survival probability is worth a further draft step, in one step of the loop.

    Source: `policy.draft_length.stop_thresholds`.

    rows: batch size. alive: rows that decode.
    """

    def __init__(self, survival: SurvivalThresholds, rows: int, alive: int, device: torch.device) -> None:
        super().__init__(0.0, rows, device, 0)
        self.survival = self._rule = survival
        self.joint = bool(survival.min_survival_shared)
        self._survived: Tensor | None = None  # [B], of what is drafted so far
        self._place, self._rows = 0, alive

    def keep(self, confidence: Tensor | None) -> Tensor | None:
        """As in `ConfidenceRule`, by survival."""
        assert confidence is not None
        how, place = self._rule, self._place
        accepted = (how.slope * confidence.clamp(3e-4, 1 - 3e-4).logit() + how.offset).sigmoid()  # [B]
        self._survived, self._place = accepted if self._survived is None else self._survived * accepted, place + 1
        return self._survived >= _at(how.min_survival_shared or how.min_survival, place)

    def together(self, going: Tensor) -> Tensor:
        """As in `ConfidenceRule`: all of them, where they pay for a draft step, or none."""
        how, place = self._rule, self._place - 1
        assert self._survived is not None
        min_survival, min_survival_shared = _at(how.min_survival, place), _at(how.min_survival_shared, place)
        above = torch.where(going, self._survived - min_survival_shared, 0.0).sum()
        return (above >= self._rows * (min_survival - min_survival_shared)).expand_as(going)


def _at(survivals: Sequence[float], place: int) -> float:
    return survivals[place] if place < len(survivals) else NEVER
