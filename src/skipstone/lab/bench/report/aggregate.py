"""From the lines of a run to figures: per model, task and temperature one group, per method one set of figures.

Totals over totals everywhere, never means of ratios. The headline takes the prompts on which no method repeats itself: looping
text flatters all that draft.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

from skipstone.decoding.stats import Stats
from skipstone.lab.bench import speedup_predictions
from skipstone.lab.bench.plan import BASELINE, THEIRS
from skipstone.lab.bench.prompts import added, calm
from skipstone.lab.bench.run_file import CELL, Line
from skipstone.lab.tasks.scores import pass_at_k
from skipstone.lab.timing.statistics import PooledRate, pooled, predicted_speedup, rate
from skipstone.methods import stored_settings

EARLY_EXIT = "hf-early-exit"
VANILLA = "speculative"  # speculative decoding with drafts of one length, AdaSD's baseline
REFERENCES = (BASELINE, THEIRS, EARLY_EXIT, VANILLA)
PARTS = ("search", "draft", "score", "other")  # of a step


@dataclass
class MeasurementGroup:
    """The lines of one task at one temperature on one model."""

    model: str
    number: int  # the task's place in the plan
    task: str
    temperature: float
    question: str  # a hash of how it was asked
    about: Line  # the model's line
    seed: int
    lines: list[Line] = field(default_factory=list)  # one a prompt
    tuned: dict[str, Line] = field(default_factory=dict)  # label -> what was chosen
    exits: Line | None = None  # how well every exit predicts the task's answers, where that was asked for
    _known: dict[Any, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def title(self) -> str:
        """What stands above its table."""
        sampled = "" if self.temperature else ", greedy"
        looping = "" if self.headline() else ", all prompts: every one loops somewhere"
        return f"{self.subject}, {self.name}{sampled}{looping}"

    @property
    def subject(self) -> str:
        """The model as it is to be called everywhere."""
        return f"SYNTHETIC MODEL: {self.model}" if self.about["synthetic"] else self.model

    @property
    def name(self) -> str:
        """The task, and its temperature where it samples."""
        return f"{self.task}, T = {self.temperature:g}" if self.temperature else self.task

    def shown_as(self, label: str) -> str:
        """A method as it is to be called everywhere."""
        return label if self.about["methods"][label]["lossless"] else f"{label} (lossy)"

    @property
    def labels(self) -> list[str]:
        """The methods in the order in which they were named."""
        return list(dict.fromkeys(label for line in self.lines for label in line["rows"]))

    def called(self, method: str) -> str | None:
        """The label of a method, the first one's where several have it; None where it took no part. Of VANILLA one with
        drafts of one length, rather with the usual length than with another."""
        found = [label for label, about in self.about["methods"].items() if about["method"] == method]
        if method == VANILLA:
            found = [label for label in found if self.settings(label).get("schedule", "constant") == "constant"]
            found.sort(key=lambda label: "num_speculative_tokens" in self.settings(label))
        return found[0] if found else None

    def rows(self, label: str) -> list[Line]:
        """What a method did, prompt by prompt, where it took part."""
        return [line["rows"][label] for line in self.lines if label in line["rows"]]

    def beside_plain(self, label: str) -> list[tuple[Line, Line]]:
        """(what a method did, what plain decoding did), prompt by prompt, where both took part."""
        plain = self.called(BASELINE)
        return [(line["rows"][label], line["rows"][plain]) for line in self.lines if {label, plain} <= line["rows"].keys()]

    def settings(self, label: str) -> dict[str, Any]:
        """A method's settings, chosen or given."""
        about = self.about["methods"][label]
        return stored_settings(about["method"], self.tuned[label]["chosen"] if label in self.tuned else about["settings"] or {})

    def shown(self) -> list[Line]:
        """The headline's lines; all, where none is left."""
        return self.headline() or self.lines

    def by_category(self) -> "list[MeasurementGroup]":
        """A group for every category of its prompts, in the order of their names; none where there is at most one."""
        names = sorted({line.get("category") or "" for line in self.lines})
        if len(names) < 2:
            return []
        return [replace(self, task=name, lines=[x for x in self.lines if (x.get("category") or "") == name]) for name in names]

    def headline(self) -> list[Line]:
        """Lines on which no method repeats itself."""
        return [line for line in self.lines if calm(line)]

    def figures(self, label: str, lines: Sequence[Line]) -> dict[str, Any] | None:
        """One method's figures over some lines as plain JSON values; None where it has none of them. Counted once."""
        key = (label, *(line["index"] for line in lines))
        if key not in self._known:
            self._known[key] = self._figures(label, lines)
        return self._known[key]

    def over_all(self, label: str) -> dict[str, Any]:
        """One method's figures over all prompts on which it took part."""
        return self.figures(label, self.lines) or {}

    def _figures(self, label: str, lines: Sequence[Line]) -> dict[str, Any] | None:
        lines = [line for line in lines if label in line["rows"]]
        if not lines:
            return None
        rows = [line["rows"][label] for line in lines]
        tokens, seconds = ([row[name] for row in rows] for name in ("tokens", "seconds"))
        found: dict[str, Any] = {
            "prompts": len(rows),
            "tokens": float(sum(tokens)),
            "seconds": float(sum(seconds)),
            "tokens_per_second": pooled(tokens, seconds),
            "repeated_share": pooled([row["repeated_share"] * row["tokens"] for row in rows], tokens),
            "share_of_ceiling": pooled(tokens, seconds) / self.about["ceiling"]["tokens_per_second"],
            "peak_memory": max((row["memory"] for row in rows if row["memory"] is not None), default=None),
            **_latency(rows),
            "speedups": {},
            "equal": {},
            "scores": _scores(rows),
            "means": _means(rows),
            "lossless": self.about["methods"][label]["lossless"],
        }
        for reference in REFERENCES:
            theirs = self.called(reference)
            base = [line["rows"][theirs] for line in lines if theirs in line["rows"]]
            if len(base) != len(lines):
                continue
            found["speedups"][reference] = asdict((self._rate(label, lines) / self._rate(str(theirs), lines)).estimate())
            if self.temperature == 0:
                found["equal"][reference] = sum(a["digests"] == b["digests"] for a, b in zip(rows, base, strict=True))
        if all(row["stats"] for row in rows):
            total = Stats.total(Stats.from_summary(row["stats"]) for row in rows)
            found |= own_figures(total, sum(seconds), sum(row.get("setup_seconds", 0.0) for row in rows))
            plain = [row for line in lines if (row := line["rows"].get(self.called(BASELINE))) and row["stats"]]
            if total.draft_steps and len(plain) == len(rows):
                found |= expectation(total, rows, plain)
                found["costed_speedup"] = self._costed(label, lines, total)
        return found

    def _costed(self, label: str, lines: Sequence[Line], total: Stats) -> float | None:
        """The speed-up that the model's costs predict of some lines; None where nothing follows from costs."""
        said = self.about.get("drafters", {}).get(label)
        candidate = self.tuned[label]["candidate"] if label in self.tuned else 0
        if self.temperature or not said or said[candidate] is None:
            return None
        rows, calls = [line["rows"][label] for line in lines], sum(line["rows"][label]["calls"] for line in lines)
        before = fmean(length for line in lines for length in line["prompt_tokens"])
        context = before + sum(row["tokens"] for row in rows) / calls / 2
        known, grown = rows[-1].get("known"), added([row["grown"] for row in rows if row.get("grown")])
        return speedup_predictions.speedup(self.about["costs"], said[candidate], total, context, known, grown)

    def _rate(self, label: str, lines: Sequence[Line]) -> PooledRate:
        """A method's tokens a second over lines on which it took part. Counted once."""
        key = ("rate", label, *(line["index"] for line in lines))
        if key not in self._known:
            self._known[key] = speed([line["rows"][label] for line in lines], self.seed)
        return self._known[key]


def _means(rows: Sequence[Line]) -> dict[str, float]:
    """Means over all tokens, by AdaSD's names; without those that nothing was counted for."""
    totals = added([(row.get("grown") or {}).get("means", {}) for row in rows]) or {}
    return {name: total["sum"] / total["count"] for name, total in totals.items() if total["count"]}


def speed(rows: Sequence[Line], seed: int = 0) -> PooledRate:
    """Tokens a second over all of some prompts, and its resamples."""
    return rate([row["tokens"] for row in rows], [row["seconds"] for row in rows], seed)


def tokens_per_second(rows: Sequence[Line]) -> float:
    """Tokens a second over all of some prompts."""
    return pooled([row["tokens"] for row in rows], [row["seconds"] for row in rows])


def groups(lines: Sequence[Line]) -> list[MeasurementGroup]:
    """The groups of a run's lines, in their order."""
    about = {line["model"]: line for line in lines if line["kind"] == "model"}
    seed = lines[0]["plan"]["seed"] if lines else 0
    found: dict[tuple[Any, ...], MeasurementGroup] = {}
    for line in (line for line in lines if line["kind"] in ("tuned", "exits", "prompt")):
        key = tuple(line[name] for name in CELL)
        group = found.setdefault(
            key, MeasurementGroup(**dict(zip(CELL, key, strict=True)), about=about[line["model"]], seed=seed)
        )
        if line["kind"] == "prompt":
            group.lines.append(line)
        elif line["kind"] == "exits":
            group.exits = line
        else:
            group.tuned[line["method"]] = line
    return [group for group in found.values() if group.lines]


def _latency(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Milliseconds to the first token, and for every further one; calls pooled."""
    if any(row["first_seconds"] is None for row in rows):
        return {"ttft_ms": None, "tpot_ms": None}
    first, calls = sum(row["first_seconds"] for row in rows), sum(row["calls"] for row in rows)
    rest, further = sum(row["seconds"] for row in rows) - first, sum(row["tokens"] for row in rows) - calls
    return {"ttft_ms": 1000 * first / calls, "tpot_ms": 1000 * rest / further if further > 0 else None}


def _scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Mean scores over prompts; of tasks that pass or fail and have several samples, pass@k."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for row in rows for one in row["scores"] for name in one):
        given = ([one[name] for one in row["scores"] if name in one] for row in rows)
        per_prompt = [values for values in given if values]
        if name == "pass":
            for k in sorted({1, min(map(len, per_prompt))}):
                found[f"pass@{k}"] = fmean(pass_at_k(len(values), round(sum(values)), k) for values in per_prompt)
        else:
            found[name] = fmean(map(fmean, per_prompt))
    return found


def own_figures(total: Stats, seconds: float, setup: float = 0.0) -> dict[str, Any]:
    """M, alpha and where the time of a step went. seconds: wall-clock of the calls; setup: the part of it before first passes;
    untimed_share: of what no span covers."""
    steps = max(total.steps, 1)
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "acceptance_rate": total.acceptance_rate if total.draft_steps else None,
        "steps": total.steps,
        "drafting_share": total.drafting / steps,
        "drafted": total.drafted,
        "drafts_per_step": total.draft_steps / steps,
        "accepted": total.accepted,
        "probes": total.probes,
        "overruled": total.overruled,
        **{f"{part}_ms_per_step": spent for part, spent in total.step_milliseconds().items()},
        "setup_seconds": setup,
        "prefill_seconds": total.seconds_prefill,
        "untimed_share": max(0.0, 1 - (setup + total.seconds_prefill + total.seconds) / seconds),
        "acceptance_histogram": total.summary()["acceptance_histogram"],
    }


def expectation(total: Stats, mine: Sequence[Line], plain: Sequence[Line]) -> dict[str, float]:
    """The speed-up that the method's own costs, M and alpha predict, and what decoding reached, setup and prefill apart.

    predicted = plain seconds a token x tokens a step / (draft + scoring seconds a step); plain: our autoregressive on the same
    prompts. decode speed-up = the two rows' decode seconds a token, wall-clock less setup and prefill. Probe steps are left out
    of the prediction, not of the measurement.
    """
    base, own = _decode_seconds_per_token(plain), _decode_seconds_per_token(mine)
    tokens_per_step = (total.tokens - total.probes) / total.steps if total.steps else 1.0
    step = (total.seconds_draft + total.seconds_score) / total.turns if total.turns else 0.0
    predicted = predicted_speedup(base, tokens_per_step, step)
    reached = base / own if own else math.nan
    return {
        "plain_ms_per_token": 1000 * base,
        "tokens_per_step": tokens_per_step,
        "predicted_speedup": predicted,
        "decode_speedup": reached,
        "measured_over_predicted": reached / predicted,
    }


def _decode_seconds_per_token(rows: Sequence[Line]) -> float:
    seconds = [row["seconds"] - row.get("setup_seconds", 0.0) - row["stats"]["seconds_prefill"] for row in rows]
    return pooled(seconds, [row["tokens"] - row["stats"]["prefill_tokens"] for row in rows])
