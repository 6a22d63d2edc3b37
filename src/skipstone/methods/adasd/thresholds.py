"""AdaSD's two thresholds (arXiv 2512.11280, sections 4.3 and 4.4, appendix B).

Both come from running means over the accepted and rejected draft tokens of one request.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from skipstone.decoding.draft import RowVerdict
from skipstone.utils.limits import SMALL_STATE_BYTES

MEANS = tuple(f"{what}_{of}" for what in ("entropy", "distance") for of in ("accepted", "rejected", "threshold"))
"""Names of the means in a report."""
Variant = Literal["A", "B", "C"]


@dataclass
class RunningMean:
    """A running mean. total: of `count` values, from `additions` drafts."""

    total: float = 0.0
    count: int = 0
    additions: int = 0

    def add(self, values: Sequence[float]) -> None:
        """Add the values of a draft, if it has any."""
        self.total += sum(values)
        self.count += len(values)
        self.additions += bool(values)

    @property
    def value(self) -> float:
        """0 without values."""
        return self.total / max(self.count, 1)


class GenerationThreshold(RunningMean):
    """tau_g: the mean entropy of the rejected draft tokens, in bits. Drafting stops after a token with a higher entropy."""

    @property
    def value(self) -> float:
        """Infinite without a rejected token."""
        return super().value if self.count else math.inf


class VerificationThreshold:
    """tau_v: the middle between the mean Jensen-Shannon distances of accepted and of rejected draft tokens.

    Draft tokens with a smaller distance are accepted unconditionally. variant (appendix B): "A", the mean of accepted tokens;
    "B", the mean of all tokens; "C", the two means weighted by the numbers of drafts with an accepted and a rejected token.
    """

    def __init__(self, variant: Variant | None = None) -> None:
        self.variant = variant
        self.accepted, self.rejected = RunningMean(), RunningMean()

    @property
    def value(self) -> float:
        """In [0, 1]. It is 0, and waives nothing, until there are an accepted and a rejected token."""
        accepted, rejected = self.accepted, self.rejected
        if not (accepted.count and rejected.count):
            return 0.0
        weights = {
            "A": (1, 0),
            "B": (accepted.count, rejected.count),
            "C": (accepted.additions, rejected.additions),
            None: (1, 1),
        }[self.variant]
        return (weights[0] * accepted.value + weights[1] * rejected.value) / sum(weights)

    def add(self, accepted: Sequence[float], rejected: Sequence[float]) -> None:
        """Add the distances of a draft."""
        self.accepted.add(accepted)
        self.rejected.add(rejected)


class AdaSDCounts:
    """Counts and means over all requests, for reports."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = self.overruled = 0
        self._means = {name: RunningMean() for name in MEANS}

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
        self, what: str, accepted: Sequence[float], rejected: Sequence[float], threshold: float, is_known: bool
    ) -> None:
        """Count one draft. what: "entropy" or "distance". accepted, rejected: the values. is_known: there is a threshold."""
        for name, values in (("accepted", accepted), ("rejected", rejected)):
            self._means[f"{what}_{name}"].add(values)
        if is_known and (accepted or rejected):
            self._means[f"{what}_threshold"].add([threshold])

    def report(self) -> dict[str, Any]:
        """Counts, and means as {"sum", "count"}, so that several can be pooled."""
        counts = {name: getattr(self, name) for name in ("steps", "drafted", "accepted", "overruled")}
        pooled = {name: {"sum": mean.total, "count": mean.count} for name, mean in self._means.items()}
        return {**counts, "means": pooled}
