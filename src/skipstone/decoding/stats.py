"""Statistics of decoding: sums over Steps."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skipstone.decoding.draft import Step
from skipstone.policy.cost_model import speedup


@dataclass(slots=True)
class Stats:
    """Sums over Steps. The first token of a row belongs to the prefill and to no step.

    steps: number of (row, step) pairs that committed tokens by decoding; drafting: those with a draft. turns: number of steps
    of the loop. Probe steps are counted separately. drafters: turns by drafter, for `auto`. Times are in seconds.
    """

    tokens: int = 0
    prefill_tokens: int = 0
    steps: int = 0
    drafting: int = 0
    turns: int = 0
    drafted: int = 0
    draft_steps: int = 0
    accepted: int = 0
    overruled: int = 0
    verified_nodes: int = 0
    probes: int = 0
    seconds_prefill: float = 0.0
    seconds_search: float = 0.0
    seconds_draft: float = 0.0
    seconds_score: float = 0.0
    seconds_other: float = 0.0
    seconds_probe: float = 0.0
    histogram: Counter[int] = field(default_factory=Counter)
    drafters: Counter[str] = field(default_factory=Counter)

    def add(self, step: Step) -> None:
        """Count one step."""
        if step.prefill:
            self.prefill_tokens += sum(map(len, step.tokens))
            self.seconds_prefill += step.seconds
            return
        self.tokens += sum(map(len, step.tokens))
        if step.drafter:
            self.drafters[step.drafter] += 1
        if step.probe:
            self.probes += 1
            self.seconds_probe += step.seconds
            return
        self.turns += 1
        for row, tokens in enumerate(step.tokens):
            if tokens:
                self.steps += 1
                self.drafting += step.draft_steps[row] > 0
                self.histogram[step.accepted[row]] += 1
        self.drafted += sum(step.drafted)
        self.draft_steps += sum(step.draft_steps)
        self.accepted += sum(step.accepted)
        self.overruled += sum(step.overruled)
        self.verified_nodes += step.verified_nodes
        for name in ("seconds_search", "seconds_draft", "seconds_score", "seconds_other"):
            setattr(self, name, getattr(self, name) + getattr(step, name))

    def merge(self, other: "Stats") -> None:
        """Add the statistics of another call."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.histogram.update(other.histogram)
        self.drafters.update(other.drafters)

    @classmethod
    def total(cls, calls: Iterable["Stats"]) -> "Stats":
        """The statistics of several calls together."""
        total = cls()
        for stats in calls:
            total.merge(stats)
        return total

    @property
    def seconds_drafting(self) -> float:
        """Time of all decoding steps except probes."""
        return self.seconds_search + self.seconds_draft + self.seconds_score + self.seconds_other

    @property
    def seconds(self) -> float:
        """Decoding time without the prefill."""
        return self.seconds_drafting + self.seconds_probe

    @property
    def acceptance_rate(self) -> float:
        """alpha = accepted / draft steps; 0 if nothing was drafted."""
        return self.accepted / self.draft_steps if self.draft_steps else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """M = 1 + accepted / steps, pooled over steps."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def speed_up_bound(self) -> float | None:
        """An upper bound of the speed-up over plain decoding; None if no draft passes ran.

        It assumes that a plain step costs one draft pass and one scoring pass. No plain step costs more."""
        if not self.seconds_drafting or not self.seconds_draft or not self.draft_steps:
            return None
        passes = max(self.draft_steps / self.steps, 1.0)
        plain = self.seconds_draft / passes + self.seconds_score
        return speedup(self.mean_acceptance_length, self.seconds_drafting, plain)

    @property
    def tokens_per_second(self) -> float:
        """All new tokens over all time, prefill included."""
        seconds = self.seconds + self.seconds_prefill
        return (self.tokens + self.prefill_tokens) / seconds if seconds else 0.0

    def step_milliseconds(self) -> dict[str, float]:
        """Mean milliseconds of each part of a step, without probes."""
        turns = max(self.turns, 1)
        return {part: 1000 * getattr(self, f"seconds_{part}") / turns for part in ("search", "draft", "score", "other")}

    def summary(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return {
            "new_tokens": self.tokens + self.prefill_tokens,
            **{name: getattr(self, name) for name in ("prefill_tokens", "steps", "drafting", "turns")},
            **{name: getattr(self, name) for name in ("drafted", "draft_steps", "accepted", "overruled", "verified_nodes")},
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "acceptance_histogram": {str(k): self.histogram[k] for k in sorted(self.histogram)},
            "tokens_per_second": self.tokens_per_second,
            **{name: getattr(self, name) for name in self.__dataclass_fields__ if name.startswith("seconds_")},
            "probes": self.probes,
            **({"drafters": dict(self.drafters.most_common())} if self.drafters else {}),
        }

    @classmethod
    def from_summary(cls, summary: Mapping[str, Any]) -> "Stats":
        """The statistics from a `summary`. Counts that an older summary lacks are 0."""
        known = {name: summary.get(name, 0) for name in _COUNTS}
        known["tokens"] = summary["new_tokens"] - summary["prefill_tokens"]
        histogram = Counter({int(key): count for key, count in summary["acceptance_histogram"].items()})
        return cls(**known, histogram=histogram, drafters=Counter(summary.get("drafters", {})))


_COUNTS = tuple(name for name in Stats.__dataclass_fields__ if name not in ("histogram", "drafters"))
"""Fields that are plain numbers."""
