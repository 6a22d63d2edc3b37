"""How fast a run was beside plain decoding: figures for the warning at its end, from a few plain steps taken on the way."""

from skipstone.decoding.draft import Step
from skipstone.decoding.stats import Stats

SPACING = 24  # turns before the first probe and between two: probes are at most 4 % of the steps
PROBES = 3  # most probes of one run
FEW_TOKENS = 1.75  # mean tokens a step from which on nobody doubts that drafting pays


class Pace:
    """What the steps of one run cost, and a few plain steps ("probes") that tell what plain decoding costs.

    A probe commits a token like any step, so it costs little. It is taken only where the text cannot depend on it (greedy rows
    of a lossless method) and where steps commit few tokens. Which steps are probes follows from the tokens, never from the
    time, so that a call takes the same steps every time.
    """

    def __init__(self) -> None:
        self.stats = Stats()
        self.since_probe = 0

    def add(self, step: Step) -> None:
        """Count a decoding step."""
        self.stats.add(step)
        self.since_probe = 0 if step.probe else self.since_probe + 1

    def wants_probe(self) -> bool:
        """Whether the next step should be a plain one."""
        s = self.stats
        if s.probes >= PROBES or self.since_probe < SPACING:
            return False
        return s.draft_steps > 0 and s.mean_acceptance_length < FEW_TOKENS

    def bound(self) -> float | None:
        """The speed-up over plain decoding if a plain step cost one draft pass and one scoring pass. No plain step costs more,
        so the true speed-up is at most this. None before anything was drafted."""
        s = self.stats
        if not s.turns or not s.seconds_drafting or not s.draft_steps:
            return None
        passes = max(s.draft_steps / s.steps, 1.0)
        plain = (s.seconds_draft / passes + s.seconds_score) / s.turns
        return s.mean_acceptance_length * plain / (s.seconds_drafting / s.turns)

    def estimate(self) -> float | None:
        """The speed-up over the plain steps of the same run; None without probes."""
        s = self.stats
        if not s.probes or not s.turns:
            return None
        return s.mean_acceptance_length * (s.seconds_probe / s.probes) / (s.seconds_drafting / s.turns)
