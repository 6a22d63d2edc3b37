"""Figures of a run: one group per model, task and temperature; one set of figures per method and group.

Rates are total over total, never means of ratios. The headline leaves out prompts on which a method repeats itself, because
repetitive text flatters every method that drafts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import numpy as np

from skipstone.decoding.stats import Stats
from skipstone.lab.bench import speedup_predictions
from skipstone.lab.bench.plan import BASELINE, THEIRS
from skipstone.lab.bench.prompts import add_counts, is_calm
from skipstone.lab.bench.run_file import CELL, Line
from skipstone.lab.tasks.scores import pass_at_k
from skipstone.lab.timing.statistics import PooledRate, mean, pooled, rate
from skipstone.methods import stored_settings
from skipstone.policy.cost_model import StepCosts, speedup

EARLY_EXIT = "hf-early-exit"
VANILLA = "speculative"  # speculative decoding with drafts of one length, AdaSD's baseline
REFERENCES = (BASELINE, THEIRS, EARLY_EXIT, VANILLA)
PARTS = ("search", "draft", "score", "other")  # of a step


@dataclass
class MeasurementGroup:
    """The measured prompts of one task at one temperature on one model."""

    model: str
    number: int  # the task's index in the plan
    task: str
    temperature: float
    question: str  # a hash of the task's settings
    about: Line  # the model's line
    seed: int
    lines: list[Line] = field(default_factory=list)  # one per prompt
    tuned: dict[str, Line] = field(default_factory=dict)  # label -> the line with its chosen settings
    first: dict[str, Line] = field(default_factory=dict)  # label -> the line of its first request on the model
    exits: Line | None = None  # figures of every exit (`exit_statistics`), if they were measured

    @property
    def subject(self) -> str:
        """The model's name, marked if the model is synthetic."""
        return f"SYNTHETIC MODEL: {self.model}" if self.about["synthetic"] else self.model

    @property
    def name(self) -> str:
        """The task's name, with the temperature if it samples."""
        return f"{self.task}, T = {self.temperature:g}" if self.temperature else self.task

    @property
    def title(self) -> str:
        """The heading of its table."""
        sampling = "" if self.temperature else ", greedy"
        looping = "" if self.headline() else ", all prompts: every one loops somewhere"
        return f"{self.subject}, {self.name}{sampling}{looping}"

    @property
    def labels(self) -> list[str]:
        """The methods in the order of the plan."""
        return list(dict.fromkeys(label for line in self.lines for label in line["rows"]))

    def display_name(self, label: str) -> str:
        """The label, marked if the method may change the text."""
        return label if self.about["methods"][label]["lossless"] else f"{label} (lossy)"

    def label_of(self, method: str) -> str | None:
        """The first label with this method, or None.

        For VANILLA only constant draft lengths count, and the default length comes before others.
        """
        labels = [label for label, about in self.about["methods"].items() if about["method"] == method]
        if method == VANILLA:
            labels = [label for label in labels if self.settings(label).get("schedule", "constant") == "constant"]
            labels.sort(key=lambda label: "num_speculative_tokens" in self.settings(label))
        return labels[0] if labels else None

    def settings(self, label: str) -> dict[str, Any]:
        """The settings of a method, given or chosen by measurement."""
        about = self.about["methods"][label]
        return stored_settings(about["method"], self.tuned[label]["chosen"] if label in self.tuned else about["settings"] or {})

    def rows(self, label: str) -> list[Line]:
        """The rows of a method, prompt by prompt."""
        return [line["rows"][label] for line in self.lines if label in line["rows"]]

    def pairs_with_plain(self, label: str, lines: Sequence[Line] | None = None) -> list[tuple[Line, Line]]:
        """(row of the method, row of plain decoding) of every prompt that has both. lines: default all."""
        plain = self.label_of(BASELINE)
        rows = (line["rows"] for line in (self.lines if lines is None else lines))
        return [(row[label], row[plain]) for row in rows if {label, plain} <= row.keys()]

    def headline(self) -> list[Line]:
        """The lines on which no method repeats itself (`is_calm`)."""
        return self.calm(self.lines)

    def calm(self, lines: Iterable[Line]) -> list[Line]:
        """Those of some lines on which no method repeats itself."""
        methods = {label: about["method"] for label, about in self.about["methods"].items()}
        return [line for line in lines if is_calm(line, methods)]

    def shown_lines(self) -> list[Line]:
        """The headline's lines, or all lines if the headline is empty."""
        return self.headline() or self.lines

    def by_category(self) -> "list[MeasurementGroup]":
        """One group per category of prompts, sorted by name; empty if there is at most one category."""
        names = sorted({line.get("category") or "" for line in self.lines})
        if len(names) < 2:
            return []
        return [replace(self, task=name, lines=[x for x in self.lines if (x.get("category") or "") == name]) for name in names]

    def over_all(self, label: str) -> dict[str, Any]:
        """The figures of a method over all of its prompts."""
        return self.figures(label, self.lines) or {}

    def figures(self, label: str, lines: Sequence[Line]) -> dict[str, Any] | None:
        """The figures of a method over some lines as plain JSON values, or None if it has no row there."""
        lines = [line for line in lines if label in line["rows"]]
        if not lines:
            return None
        rows = [line["rows"][label] for line in lines]
        tokens, seconds = ([row[name] for row in rows] for name in ("tokens", "seconds"))
        figures: dict[str, Any] = {
            "prompts": len(rows),
            "tokens": float(sum(tokens)),
            "seconds": float(sum(seconds)),
            "tokens_per_second": pooled(tokens, seconds),
            "repeated_share": pooled([row["repeated_share"] * row["tokens"] for row in rows], tokens),
            "share_of_ceiling": pooled(tokens, seconds) / self.about["ceiling"]["tokens_per_second"],
            "peak_memory": max((row["memory"] for row in rows if row["memory"] is not None), default=None),
            **_latency(rows),
            "first_request_seconds": self.first[label]["seconds"] if label in self.first else None,
            "speedups": {},
            "equal": {},
            "scores": {name: asdict(mean(values, self.seed)) for name, values in _scores(rows).items()},
            "score_changes": self._score_changes(label, lines),
            "means": _means(rows),
            "lossless": self.about["methods"][label]["lossless"],
            "log_likelihood": _log_likelihood(rows),
            "layer_set": _layer_set(rows),
            "early_predictions": _early_predictions(rows),
        }
        for reference in REFERENCES:
            other = self.label_of(reference)
            base = [line["rows"][other] for line in lines if other in line["rows"]]
            if len(base) == len(rows):
                figures["speedups"][reference] = asdict((speed(rows, self.seed) / speed(base, self.seed)).estimate())
                if self.temperature == 0:
                    figures["equal"][reference] = sum(a["digests"] == b["digests"] for a, b in zip(rows, base, strict=True))
        if all(row["stats"] for row in rows):
            total = Stats.total(Stats.from_summary(row["stats"]) for row in rows)
            figures |= step_figures(total, sum(seconds), sum(row.get("setup_seconds", 0.0) for row in rows))
            plain = [row for _, row in self.pairs_with_plain(label, lines) if row["stats"]]
            if total.draft_steps and len(plain) == len(rows):
                figures |= predict_speedup(total, rows, plain)
                figures["weights_read"] = _mean_by_draft_steps(rows)
                figures["costed_speedup"] = self._predict_from_costs(label, lines, total)
        return figures

    def _score_changes(self, label: str, lines: Sequence[Line]) -> dict[str, dict[str, float]]:
        """Name -> the mean difference between a method's scores and plain decoding's of the same prompts, with its interval."""
        pairs = self.pairs_with_plain(label, lines)
        own, plain = (_scores([pair[side] for pair in pairs]) for side in (0, 1))
        changes = {name: np.subtract(own[name], plain[name]) for name in own if len(own[name]) == len(plain.get(name, ()))}
        return {name: asdict(rate(change, np.ones(len(change)), self.seed).estimate()) for name, change in changes.items()}

    def _predict_from_costs(self, label: str, lines: Sequence[Line], total: Stats) -> float | None:
        """The speed-up predicted by the model's measured costs, or None if they predict none."""
        drafters = self.about.get("drafters", {}).get(label)
        candidate = self.tuned[label]["candidate"] if label in self.tuned else 0
        if self.temperature or not drafters or drafters[candidate] is None:
            return None
        rows = [line["rows"][label] for line in lines]
        prompt_tokens = fmean(length for line in lines for length in line["prompt_tokens"])
        context = prompt_tokens + pooled([row["tokens"] for row in rows], [row["calls"] for row in rows]) / 2
        known, grown = rows[-1].get("known"), add_counts([row["grown"] for row in rows if row.get("grown")])
        return speedup_predictions.speedup(self.about["costs"], drafters[candidate], total, context, known, grown)


def groups(lines: Sequence[Line]) -> list[MeasurementGroup]:
    """The groups of a run's lines, in their order."""
    about = {line["model"]: line for line in lines if line["kind"] == "model"}
    first: dict[str, dict[str, Line]] = {model: {} for model in about}
    for line in (line for line in lines if line["kind"] == "first"):
        first[line["model"]][line["method"]] = line
    seed = lines[0]["plan"]["seed"] if lines else 0
    by_cell: dict[tuple[Any, ...], MeasurementGroup] = {}
    for line in (line for line in lines if line["kind"] in ("tuned", "exits", "prompt")):
        cell = {name: line[name] for name in CELL}
        group = by_cell.setdefault(
            (*cell.values(),), MeasurementGroup(**cell, about=about[line["model"]], seed=seed, first=first[line["model"]])
        )
        if line["kind"] == "prompt":
            group.lines.append(line)
        elif line["kind"] == "exits":
            group.exits = line
        else:
            group.tuned[line["method"]] = line
    return [group for group in by_cell.values() if group.lines]


def speed(rows: Sequence[Line], seed: int = 0) -> PooledRate:
    """Tokens per second over all rows, with its bootstrap resamples."""
    return rate([row["tokens"] for row in rows], [row["seconds"] for row in rows], seed)


def tokens_per_second(rows: Sequence[Line]) -> float:
    """Tokens per second over all rows."""
    return pooled([row["tokens"] for row in rows], [row["seconds"] for row in rows])


def _means(rows: Sequence[Line]) -> dict[str, float]:
    """Means over all tokens, by AdaSD's names; names without a count are left out."""
    totals = add_counts([(row.get("grown") or {}).get("means", {}) for row in rows]) or {}
    return {name: total["sum"] / total["count"] for name, total in totals.items() if total["count"]}


def _log_likelihood(rows: Sequence[Line]) -> float | None:
    """Mean log-likelihood of the tokens under the target in nats, or None if it was not measured."""
    if any(row.get("log_likelihood") is None for row in rows):
        return None
    return share(sum(row["log_likelihood"] for row in rows), sum(row["tokens"] for row in rows))


def _layer_set(rows: Sequence[Line]) -> dict[str, Any] | None:
    """What is known of the set of skipped layers after the last prompt, or None for other methods."""
    known = rows[-1].get("known")
    if not known or "skipped" not in known:
        return None
    about = {name: known.get(name) for name in ("skip_ratio", "matchness", "evaluations")}
    return {**about, "left_out": sum(map(len, known["skipped"].values()))}


def _early_predictions(rows: Sequence[Line]) -> dict[str, Any] | None:
    """AdaDecode's counts, or None for other methods.

    exits: exit layer -> counts of tests, predicted, accepted and rejected. share: of the tokens. rejected: share of the judged
    predictions (Figures 5b and 5c).
    """
    exits = add_counts([(row.get("grown") or {}).get("exits", {}) for row in rows])
    if not exits:
        return None
    accepted, rejected = (sum(counts[name] for counts in exits.values()) for name in ("accepted", "rejected"))
    tokens = sum(row["tokens"] for row in rows)
    return {"exits": exits, "share": share(accepted, tokens), "rejected": share(rejected, accepted + rejected)}


def share(count: float, total: float) -> float | None:
    """count / total, or None if the total is 0."""
    return count / total if total else None


def _mean_by_draft_steps(rows: Sequence[Line]) -> float | None:
    """The mean share of the weights that a draft step reads; None if it is unknown."""
    steps, shares = [row["stats"]["draft_steps"] for row in rows], [row.get("weights_read") for row in rows]
    known = [(share * count, count) for share, count in zip(shares, steps, strict=True) if share is not None]
    return pooled(*zip(*known, strict=True)) if sum(count for _, count in known) else None


def _latency(rows: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Milliseconds to the first token and per further token, pooled over calls."""
    if any(row["first_seconds"] is None for row in rows):
        return {"ttft_ms": None, "tpot_ms": None}
    tokens, seconds, first, calls = (sum(row[name] for row in rows) for name in ("tokens", "seconds", "first_seconds", "calls"))
    return {"ttft_ms": 1000 * first / calls, "tpot_ms": 1000 * (seconds - first) / (tokens - calls) if tokens > calls else None}


def _scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """The scores of every prompt that has them. A pass-or-fail task with several samples gives pass@k."""
    scores: dict[str, list[float]] = {}
    for name in dict.fromkeys(name for row in rows for sample in row["scores"] for name in sample):
        samples = ([sample[name] for sample in row["scores"] if name in sample] for row in rows)
        per_prompt = [values for values in samples if values]
        if name == "pass":
            for k in sorted({1, min(map(len, per_prompt))}):
                scores[f"pass@{k}"] = [pass_at_k(len(values), round(sum(values)), k) for values in per_prompt]
        else:
            scores[name] = [*map(fmean, per_prompt)]
    return scores


def step_figures(total: Stats, seconds: float, setup: float = 0.0) -> dict[str, Any]:
    """M, alpha and the time of a mean step.

    seconds: wall-clock time of the calls. setup: the part of it before the first passes. untimed_share: the share of the
    wall-clock time that no timer covers.
    """
    steps = max(total.steps, 1)
    return {
        "mean_acceptance_length": total.mean_acceptance_length,
        "acceptance_rate": total.acceptance_rate if total.draft_steps else None,
        "drafting_share": total.drafting / steps,
        "drafts_per_step": total.draft_steps / steps,
        **{name: getattr(total, name) for name in ("steps", "drafted", "accepted", "probes", "overruled")},
        **{f"{part}_ms_per_step": spent for part, spent in total.step_milliseconds().items()},
        "setup_seconds": setup,
        "prefill_seconds": total.seconds_prefill,
        "untimed_share": max(0.0, 1 - (setup + total.seconds_prefill + total.seconds) / seconds),
        "acceptance_histogram": total.summary()["acceptance_histogram"],
    }


def predict_speedup(total: Stats, own: Sequence[Line], plain: Sequence[Line]) -> dict[str, float]:
    """The predicted and the measured speed-up of decoding, set-up and prefill left out.

    predicted = plain seconds per token x tokens per step / (draft + scoring seconds per step), with our plain decoding on the
    same prompts. Probe steps are left out of the prediction, not of the measurement. With c, the cost of a draft step, and v,
    that of scoring, in plain steps, this is SWIFT's Eq. 6, M / ((M - 1) c / alpha + v). paper_speedup: the same with v = 1.
    """
    base, seconds = _decode_seconds_per_token(plain), _decode_seconds_per_token(own)
    tokens_per_step = (total.tokens - total.probes) / total.steps if total.steps else 1.0
    step_seconds = (total.seconds_draft + total.seconds_score) / total.turns if total.turns else 0.0
    predicted = speedup(tokens_per_step, step_seconds, base) if step_seconds else math.nan
    measured = base / seconds if seconds else math.nan
    c, drafts = total.seconds_draft / total.draft_steps / base, total.draft_steps / max(total.steps, 1)
    return {
        "draft_step_cost": c,
        "scoring_cost": total.seconds_score / max(total.turns, 1) / base,
        "paper_speedup": StepCosts(1.0, c, lambda _: 1.0).speedup(total.mean_acceptance_length, drafts),
        "plain_ms_per_token": 1000 * base,
        "tokens_per_step": tokens_per_step,
        "predicted_speedup": predicted,
        "decode_speedup": measured,
        "measured_over_predicted": measured / predicted,
    }


def _decode_seconds_per_token(rows: Sequence[Line]) -> float:
    seconds = [row["seconds"] - row.get("setup_seconds", 0.0) - row["stats"]["seconds_prefill"] for row in rows]
    return pooled(seconds, [row["tokens"] - row["stats"]["prefill_tokens"] for row in rows])
