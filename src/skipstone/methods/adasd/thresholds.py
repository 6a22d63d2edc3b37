"""AdaSD's two thresholds (arXiv 2512.11280, sections 4.3 and 4.4, appendix B).

Both come from running means over the accepted and rejected draft tokens of a request. Every row has its own. Everything stays
on the device without synchronisation.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from skipstone.decoding.draft import RowVerdict
from skipstone.utils.limits import SMALL_STATE_BYTES

MEANS = tuple(f"{what}_{of}" for what in ("entropy", "distance") for of in ("accepted", "rejected", "threshold"))
"""Names of the means in a report."""
Variant = Literal["A", "B", "C"]


class RunningMean:
    """Running means of masked values, one per row. total: [B] float64, of `count` values from `additions`, [B] int64 each."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.total = torch.zeros(rows, dtype=torch.float64, device=device)
        self.count = torch.zeros(rows, dtype=torch.int64, device=device)
        self.additions = torch.zeros_like(self.count)

    def add(self, values: Tensor, where: Tensor) -> None:
        """Add values [B, n]. where: [B, n] bool, the values that count."""
        self.total = self.total + torch.where(where, values.double(), 0.0).sum(1)
        self.count, self.additions = self.count + where.sum(1), self.additions + where.any(1)

    def reset(self, row: int) -> None:
        """Reset a row to zero values."""
        others = torch.arange(len(self.count), device=self.count.device, dtype=torch.int64) != row
        self.total, self.count, self.additions = self.total * others, self.count * others, self.additions * others

    @property
    def value(self) -> Tensor:
        """[B] float64, 0 for rows without values."""
        return self.total / self.count.clamp(min=1)


class GenerationThreshold(RunningMean):
    """tau_g: the mean entropy of the rejected draft tokens, in bits. Drafting stops after a token with a higher entropy."""

    @property
    def value(self) -> Tensor:
        """[B] float64; infinite for rows without a rejected token."""
        return torch.where(self.count > 0, super().value, float("inf"))


class VerificationThreshold:
    """tau_v: the middle between the mean Jensen-Shannon distances of accepted and of rejected draft tokens.

    Draft tokens with a smaller distance are accepted unconditionally. variant (appendix B): "A", the mean of accepted tokens;
    "B", the mean of all tokens; "C", the two means weighted by the numbers of drafts with an accepted and a rejected token.
    """

    def __init__(self, rows: int, device: torch.device, variant: Variant | None = None) -> None:
        self.variant = variant
        self.accepted, self.rejected = RunningMean(rows, device), RunningMean(rows, device)

    @property
    def value(self) -> Tensor:
        """[B] float64 in [0, 1]. It is 0, and waives nothing, until a row has an accepted and a rejected token."""
        accepted, rejected = self.accepted, self.rejected
        weights: tuple[Tensor | float, Tensor | float] = (0.5, 0.5)
        if self.variant == "A":
            weights = (1.0, 0.0)
        elif self.variant is not None:
            by_tokens = self.variant == "B"
            counts = (accepted.count, rejected.count) if by_tokens else (accepted.additions, rejected.additions)
            total = (counts[0] + counts[1]).clamp(min=1).double()
            weights = (counts[0] / total, counts[1] / total)
        mean = weights[0] * accepted.value + weights[1] * rejected.value
        return torch.where((accepted.count > 0) & (rejected.count > 0), mean, 0.0)

    def add(self, distances: Tensor, accepted: Tensor, rejected: Tensor) -> None:
        """Add a draft of every row. distances: [B, n]; accepted, rejected: [B, n] bool, both False for unreached tokens."""
        self.accepted.add(distances, accepted)
        self.rejected.add(distances, rejected)

    def reset(self, row: int) -> None:
        """Reset a row for a new request."""
        self.accepted.reset(row)
        self.rejected.reset(row)


class AdaSDCounts:
    """Counts and means over all requests, for reports. Means stay on the device until `report` reads them."""

    def __init__(self, device: torch.device) -> None:
        self.steps = self.drafted = self.accepted = self.overruled = 0
        self._means = {name: RunningMean(1, device) for name in MEANS}

    @property
    def nbytes(self) -> int:
        return SMALL_STATE_BYTES

    def add(self, verdicts: list[RowVerdict]) -> None:
        """Count one step."""
        drafting = [verdict for verdict in verdicts if verdict.drafted]
        self.steps += len(drafting)
        self.drafted += sum(verdict.drafted for verdict in drafting)
        self.accepted += sum(len(verdict.path) for verdict in drafting)
        self.overruled += sum(verdict.overruled for verdict in drafting)

    def add_means(
        self, what: str, values: Tensor, accepted: Tensor, rejected: Tensor, threshold: Tensor, known: Tensor
    ) -> None:
        """Count one step. what: "entropy" or "distance". values: [B, n]; accepted, rejected: [B, n] bool; threshold: [B];
        known: [B] bool, rows with a threshold."""
        for name, where in (("accepted", accepted), ("rejected", rejected)):
            self._means[f"{what}_{name}"].add(values.reshape(1, -1), where.reshape(1, -1))
        applied = known & (accepted | rejected).any(1)
        self._means[f"{what}_threshold"].add(threshold.reshape(1, -1), applied.reshape(1, -1))

    def report(self) -> dict[str, Any]:
        """Counts, and means as {"sum", "count"}, so that several can be pooled."""
        counts = {name: getattr(self, name) for name in ("steps", "drafted", "accepted", "overruled")}
        pooled = {name: {"sum": float(mean.total), "count": int(mean.count)} for name, mean in self._means.items()}
        return {**counts, "means": pooled}
