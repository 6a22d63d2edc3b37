"""AdaSD's two thresholds (arXiv 2512.11280, sections 4.3 and 4.4, appendix B).

Each is made of running means over the draft tokens of a request that were accepted or rejected. Every row of a batch has its
own. Tensors in, tensors out: nothing waits for the device.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from skipstone.decoding.draft import RowVerdict
from skipstone.utils.limits import SMALL_STATE_BYTES

MEANS = tuple(f"{what}_{of}" for what in ("entropy", "distance") for of in ("accepted", "rejected", "threshold"))
"""Names of the means that a report has."""
Variant = Literal["A", "B", "C"]


class RunningMean:
    """Running means of masked values, one per row. total: [B] float64, count: [B] int64."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.total = torch.zeros(rows, dtype=torch.float64, device=device)
        self.count = torch.zeros(rows, dtype=torch.int64, device=device)

    def add(self, values: Tensor, where: Tensor) -> None:
        """values: [B, n]; where: [B, n] bool, the values that count."""
        self.total = self.total + torch.where(where, values.double(), 0.0).sum(1)
        self.count = self.count + where.sum(1)

    def reset(self, row: int) -> None:
        """Forget what was counted for a row."""
        others = torch.arange(len(self.count), device=self.count.device, dtype=torch.int64) != row
        self.total, self.count = self.total * others, self.count * others

    @property
    def value(self) -> Tensor:
        """[B] float64, 0 where nothing was counted."""
        return self.total / self.count.clamp(min=1)


class GenerationThreshold(RunningMean):
    """tau_g: the mean entropy of the rejected draft tokens, in bits. Drafting stops after a token with a higher entropy."""

    @property
    def value(self) -> Tensor:
        """[B] float64; infinite where nothing was rejected yet."""
        return torch.where(self.count > 0, super().value, float("inf"))


class VerificationThreshold:
    """tau_v: the middle between the mean Jensen-Shannon distances of accepted and of rejected draft tokens. A draft token whose
    distance is below it is accepted, whatever the target would have chosen.

    variant: of appendix B. "A": the mean of the accepted tokens alone. "B": the mean over all tokens. "C": the two means,
    weighted by the numbers of drafts that held an accepted and a rejected token.
    """

    def __init__(self, rows: int, device: torch.device, variant: Variant | None = None) -> None:
        self.variant = variant
        self.accepted, self.rejected = RunningMean(rows, device), RunningMean(rows, device)
        # [B] each: drafts that held an accepted token, drafts that held a rejected one
        self._drafts = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(2)]

    @property
    def value(self) -> Tensor:
        """[B] float64 in [0, 1]; 0, which no distance is below, until there is an accepted and a rejected one."""
        accepted, rejected = self.accepted, self.rejected
        weights: tuple[Tensor | float, Tensor | float] = (0.5, 0.5)
        if self.variant == "A":
            weights = (1.0, 0.0)
        elif self.variant is not None:
            counts = [one.double() for one in ((accepted.count, rejected.count) if self.variant == "B" else self._drafts)]
            total = (counts[0] + counts[1]).clamp(min=1)
            weights = (counts[0] / total, counts[1] / total)
        mean = weights[0] * accepted.value + weights[1] * rejected.value
        return torch.where((accepted.count > 0) & (rejected.count > 0), mean, 0.0)

    def add(self, distances: Tensor, accepted: Tensor, rejected: Tensor) -> None:
        """One draft a row. distances: [B, n]; accepted, rejected: [B, n] bool, neither where a token was not reached."""
        self.accepted.add(distances, accepted)
        self.rejected.add(distances, rejected)
        self._drafts = [old + which.any(1) for old, which in zip(self._drafts, (accepted, rejected), strict=True)]

    def reset(self, row: int) -> None:
        """A new request starts on a row."""
        others = torch.arange(len(self.accepted.count), device=self.accepted.count.device, dtype=torch.int64) != row
        self._drafts = [old * others for old in self._drafts]
        self.accepted.reset(row)
        self.rejected.reset(row)


class AdaSDCounts:
    """Counts and means over all requests, for reports. It stays on the device until `report` reads it."""

    def __init__(self, device: torch.device) -> None:
        self.steps = self.drafted = self.accepted = self.overruled = 0
        self._means = {name: RunningMean(1, device) for name in MEANS}

    @property
    def nbytes(self) -> int:
        return SMALL_STATE_BYTES

    def add(self, verdicts: list[RowVerdict]) -> None:
        """One step, row by row."""
        drafting = [verdict for verdict in verdicts if verdict.drafted]
        self.steps += len(drafting)
        self.drafted += sum(verdict.drafted for verdict in drafting)
        self.accepted += sum(len(verdict.path) for verdict in drafting)
        self.overruled += sum(verdict.overruled for verdict in drafting)

    def add_means(
        self, what: str, values: Tensor, accepted: Tensor, rejected: Tensor, threshold: Tensor, known: Tensor
    ) -> None:
        """One step. what: "entropy" or "distance". values: [B, n]; accepted, rejected: [B, n] bool; threshold: [B]; known: [B]
        bool, rows that had a threshold."""
        for name, where in (("accepted", accepted), ("rejected", rejected)):
            self._means[f"{what}_{name}"].add(values.reshape(1, -1), where.reshape(1, -1))
        judged = known & (accepted | rejected).any(1)
        self._means[f"{what}_threshold"].add(threshold.reshape(1, -1), judged.reshape(1, -1))

    def report(self) -> dict[str, Any]:
        """Counts, and means as {"sum", "count"}, so that several can be pooled."""
        counts = {name: getattr(self, name) for name in ("steps", "drafted", "accepted", "overruled")}
        pooled = {name: {"sum": float(mean.total), "count": int(mean.count)} for name, mean in self._means.items()}
        return {**counts, "means": pooled}
