"""Statistics of decoding: sums over Steps."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from skipstone.decoding.draft import Step
from skipstone.utils.setup_times import SetupSeconds


@dataclass(slots=True)
class Stats:
    """Sums over Steps. The first token of a row belongs to the prefill and to no step. A step in which rows decode next to
    prompts is a decoding step with all its time.

    steps: number of (row, step) pairs that committed tokens by decoding; drafting: those with a draft. turns: number of steps
    of the loop. Probe steps are counted separately. drafters: turns by drafter, for `auto`. overruled: 0 without verification.
    Times are in seconds. seconds_prefill_draft: the drafter's part of the prefill. seconds_outside, setup: as in `Step`, over
    all steps.
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
    seconds_prefill_draft: float = 0.0
    seconds_search: float = 0.0
    seconds_draft: float = 0.0
    seconds_score: float = 0.0
    seconds_other: float = 0.0
    seconds_probe: float = 0.0
    seconds_outside: float = 0.0
    setup: SetupSeconds = field(default_factory=SetupSeconds)
    histogram: Counter[int] = field(default_factory=Counter)
    drafters: Counter[str] = field(default_factory=Counter)

    def add(self, step: Step) -> None:
        """Count one step."""
        self._add_setup(step.setup)
        rows, tokens = step.decoding_rows, sum(map(len, step.tokens))
        if step.prefill:
            first_tokens = step.origin.count(["prefill"])
            self.prefill_tokens, tokens = self.prefill_tokens + first_tokens, tokens - first_tokens
            if not rows:
                self.seconds_prefill += step.seconds + step.seconds_outside
                self.seconds_prefill_draft += step.seconds_draft
                return
        self.seconds_outside += step.seconds_outside
        self.tokens += tokens
        if step.drafter:
            self.drafters[step.drafter] += 1
        if step.probe:
            self.probes += 1
            self.seconds_probe += step.seconds
            return
        self.turns += 1
        self.steps += len(rows)
        for row in rows:
            self.drafting += step.draft_steps[row] > 0
            self.histogram[step.accepted[row]] += 1
        self.drafted += sum(step.drafted)
        self.draft_steps += sum(step.draft_steps)
        self.accepted += sum(step.accepted)
        self.overruled += sum(step.overruled)
        self.verified_nodes += step.verified_nodes
        for name in ("seconds_search", "seconds_draft", "seconds_score", "seconds_other"):
            setattr(self, name, getattr(self, name) + getattr(step, name))

    def _add_setup(self, setup: SetupSeconds) -> None:
        for name, seconds in setup.items():
            self.setup[name] = self.setup.get(name, 0.0) + seconds

    def merge(self, other: "Stats") -> None:
        """Add the statistics of another call."""
        for name in _COUNTS:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.histogram.update(other.histogram)
        self.drafters.update(other.drafters)
        self._add_setup(other.setup)

    @classmethod
    def total(cls, calls: Iterable["Stats"]) -> "Stats":
        """The statistics of several calls together."""
        total = cls()
        for stats in calls:
            total.merge(stats)
        return total

    @property
    def seconds_drafting(self) -> float:
        """Time of the stages of all decoding steps except probes."""
        return self.seconds_search + self.seconds_draft + self.seconds_score + self.seconds_other

    @property
    def seconds(self) -> float:
        """Decoding time without the prefill."""
        return self.seconds_drafting + self.seconds_probe + self.seconds_outside

    @property
    def seconds_setup(self) -> float:
        """Time of set-up work: in the call before its first step, and in steps."""
        return sum(self.setup.values())

    @property
    def seconds_total(self) -> float:
        """Time from the call to its last token."""
        return self.seconds_setup + self.seconds_prefill + self.seconds

    @property
    def acceptance_rate(self) -> float:
        """alpha = accepted / draft steps; 0 if nothing was drafted."""
        return self.accepted / self.draft_steps if self.draft_steps else 0.0

    @property
    def mean_acceptance_length(self) -> float:
        """M = 1 + accepted / steps, pooled over steps."""
        return 1 + self.accepted / self.steps if self.steps else 1.0

    @property
    def speed_up_bounds(self) -> tuple[float, float] | None:
        """Upper bounds of the speed-up over plain decoding: from the call to the last token, and of the decoding steps alone.
        None if no draft passes ran.

        They assume that a plain step costs one draft pass and one scoring pass. No plain step costs more."""
        if not self.seconds_drafting or not self.seconds_draft or not self.draft_steps:
            return None
        passes = max(self.draft_steps / self.steps, 1.0)
        plain = self.mean_acceptance_length * (self.seconds_draft / passes + self.seconds_score)
        whole = (self.seconds_prefill - self.seconds_prefill_draft + plain) / (self.seconds_total - self.seconds_probe)
        return whole, plain / self.seconds_drafting

    @property
    def tokens_per_second(self) -> float:
        """All new tokens over the time from the call to the last one."""
        return (self.tokens + self.prefill_tokens) / self.seconds_total if self.seconds_total else 0.0

    @property
    def steady_tokens_per_second(self) -> float:
        """Tokens after the first over the time of decoding steps, without set-up and prefill."""
        return self.tokens / self.seconds if self.seconds else 0.0

    def speed_up(self, plain_seconds: float) -> float:
        """Speed-up of one row over plain decoding, from the call to the last token. plain_seconds: of a plain step."""
        plain = self.seconds_prefill - self.seconds_prefill_draft + self.tokens * plain_seconds
        return plain / self.seconds_total if self.seconds_total else 1.0

    def steady_speed_up(self, plain_seconds: float) -> float:
        """The same without set-up and prefill."""
        return self.steady_tokens_per_second * plain_seconds if self.seconds else 1.0

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
            "steady_tokens_per_second": self.steady_tokens_per_second,
            "seconds_total": self.seconds_total,
            "setup": dict(self.setup),
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
        setup = dict(summary.get("setup", {}))
        return cls(**known, histogram=histogram, drafters=Counter(summary.get("drafters", {})), setup=setup)


_COUNTS = tuple(name for name in Stats.__dataclass_fields__ if name not in ("histogram", "drafters", "setup"))
"""Fields that are plain numbers."""
