"""What a check found: probe by probe, and all in all."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from skipstone.check.ties import Divergence


@dataclass(frozen=True)
class Scale:
    """How much is tested. samples: texts for each law and side."""

    max_new_tokens: int = 64
    samples: int = 400
    seed: int = 0


@dataclass
class Finding:
    """One probe: what it compared, how often, and what it found. drafted, accepted: draft tokens in it, for only texts with
    drafts accepted and rejected prove anything."""

    name: str
    tested: int = 0
    ties: list[Divergence] = field(default_factory=list)
    bugs: list[str] = field(default_factory=list)
    note: str = ""
    drafted: int = 0
    accepted: int = 0

    def report(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**asdict(self), "passed": not self.bugs}


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
