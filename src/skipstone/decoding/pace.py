"""Does speculation pay here? What steps cost, and plain steps taken now and then to compare them with."""

from __future__ import annotations

from skipstone.decoding.stats import Stats
from skipstone.decoding.step import Step


class Pace:
    """Does speculation pay here? Plain steps taken now and then tell what plain decoding costs.

    A probe commits a token like any step, so it costs little; it is taken only where the text cannot depend on it (greedy rows)
    and where steps commit few tokens, not in lossy modes. Which steps are probes follows from the tokens, never from the time.
    """

    WARM_UP, SPACING, PROBES, FEW_TOKENS = 8, 6, 3, 1.75

    def __init__(self) -> None:
        self.stats = Stats()
        self.since_probe = 0

    def add(self, step: Step) -> None:
        self.stats.add(step)
        self.since_probe = 0 if step.probe else self.since_probe + 1

    def wants_probe(self) -> bool:
        s = self.stats
        if s.turns < self.WARM_UP or s.probes >= self.PROBES or self.since_probe < self.SPACING:
            return False
        return s.draft_steps > 0 and s.mean_acceptance_length < self.FEW_TOKENS

    def bound(self) -> float | None:
        """Speed-up if a plain step cost one draft pass and one scoring pass: no plain step costs more."""
        s = self.stats
        seconds = s.seconds_search + s.seconds_draft + s.seconds_score + s.seconds_other
        if not s.turns or not seconds or not s.draft_steps:
            return None
        passes = max(s.draft_steps / s.steps, 1.0)
        plain = (s.seconds_draft / passes + s.seconds_score) / s.turns
        return s.mean_acceptance_length * plain / (seconds / s.turns)

    def estimate(self) -> float | None:
        """Measured speed-up over plain steps of the same run; None without probes."""
        s = self.stats
        if not s.probes or not s.turns:
            return None
        seconds = s.seconds_search + s.seconds_draft + s.seconds_score + s.seconds_other
        return s.mean_acceptance_length * (s.seconds_probe / s.probes) / (seconds / s.turns)
