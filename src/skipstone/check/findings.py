"""What a check found: probe by probe, and all in all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from skipstone.check.ties import Divergence


@dataclass(frozen=True)
class Scale:
    """How much is tested."""

    max_new_tokens: int = 64  # of a greedy text
    samples: int = 400  # texts for each law and side
    seed: int = 0


@dataclass
class Finding:
    """What one probe compared, and what it found."""

    name: str
    tested: int = 0  # comparisons
    ties: list[Divergence] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)
    note: str = ""
    drafted: int = 0  # draft tokens: only texts with drafts accepted and rejected prove anything
    accepted: int = 0

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        ties = [{name: value for name, value in asdict(one).items() if name != "texts"} for one in self.ties]
        return {**asdict(self), "ties": ties, "passed": not self.bugs}


@dataclass
class Report:
    """All probes of a method on a model."""

    method: dict[str, Any]
    dtype: str
    device: str
    findings: list[Finding]

    @property
    def passed(self) -> bool:
        """Whether no probe found a bug. Ties are no bugs."""
        return not any(finding.bugs for finding in self.findings)

    @property
    def proves(self) -> bool:
        """Whether drafts were both accepted and rejected somewhere, or the method drafts nothing."""
        drafted, accepted = (sum(getattr(one, name) for one in self.findings) for name in ("drafted", "accepted"))
        return not drafted or 0 < accepted < drafted
