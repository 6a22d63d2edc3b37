"""`--compare`: the method and plain decoding of the same prompt, interleaved in one process, counted alike."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.table import Table

from skipstone.cli.decoding import Job, Run, decode, dtype_name, warm_up
from skipstone.decoding.method import Method
from skipstone.decoding.stats import Stats
from skipstone.decoding.step import Step
from skipstone.methods.autoregressive import Autoregressive


@dataclass(frozen=True)
class Totals:
    """Runs of one method, pooled: total tokens over total time, never a mean of means."""

    name: str
    runs: list[Run]

    @property
    def tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)

    @property
    def seconds(self) -> float:
        return sum(run.seconds for run in self.runs)

    @property
    def pace(self) -> float:
        """Tokens per second, prefill and all."""
        return self.tokens / self.seconds

    def figures(self) -> dict[str, Any]:
        """Counts and times as plain JSON values. alpha and M are None where nothing was drafted."""
        total = Stats.total(run.stats for run in self.runs)
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": self.pace,
            "mean_acceptance_length": total.mean_acceptance_length if total.draft_steps else None,
            "acceptance_rate": total.acceptance_rate if total.draft_steps else None,
            **{f"ms_per_step_{part}": spent for part, spent in total.step_milliseconds().items()},
        }


_PARTS = ("search", "draft", "score", "other")


@dataclass(frozen=True)
class Divergence:
    """The first place where two texts differ; a token is None where that text has ended."""

    position: int
    plain: int | None
    method: int | None
    plain_text: str | None
    method_text: str | None

    def __str__(self) -> str:
        sides = (("plain", self.plain, self.plain_text), ("method", self.method, self.method_text))
        said = ", ".join(f"{name} {'ended' if token is None else f'{token} {text!r}'}" for name, token, text in sides)
        return f"first difference at token {self.position}: {said}"


@dataclass(frozen=True)
class Comparison:
    """plain and method: the pooled runs, run i of one next to run i of the other. law_only: the same text was not to be
    expected, so none was looked for; else divergence says where the texts part, None where they are identical."""

    job: Job
    method: Method
    plain: Totals
    other: Totals
    law_only: bool
    divergence: Divergence | None

    @property
    def speed_up(self) -> float:
        return self.other.pace / self.plain.pace

    @property
    def identical(self) -> bool | None:
        return None if self.law_only else self.divergence is None

    def verdict(self) -> str:
        """What the runs say about the text, in one line."""
        if self.law_only:
            return (
                "texts: equal in law only (temperature > 0, standard rule), so not compared; "
                "under rejection_sample_method=coupled they must be the same"
            )
        said = "texts identical: yes" if self.divergence is None else f"texts identical: no, {self.divergence}"
        if not self.method.lossless:
            return f"{said} ({self.method.name} is lossy: its text may differ)"
        if self.divergence is not None and self.job.model.dtype != torch.float32:
            return f"{said} (in {dtype_name(self.job.model)} a near tie may round either way; try --dtype float32)"
        return said

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "repeats": len(self.plain.runs),
            "speed_up": self.speed_up,
            "identical": self.identical,
            "lossless": self.method.lossless,
            "verdict": self.verdict(),
            "divergence": None if self.divergence is None else asdict(self.divergence),
            "plain": self.plain.figures(),
            "method": self.other.figures(),
        }

    def table(self) -> Table:
        rows = [totals.figures() | {"speed_up": totals.pace / self.plain.pace} for totals in (self.plain, self.other)]
        columns = [one for one in _COLUMNS if one[1] != "ms_per_step_search" or any(figures[one[1]] for figures in rows)]
        table = Table("", *(name for name, _, _ in columns))
        for totals, figures in zip((self.plain, self.other), rows, strict=True):
            cells = ["-" if figures[key] is None else form.format(figures[key]) for _, key, form in columns]
            table.add_row(totals.name, *cells)
        for column in table.columns[1:]:
            column.justify = "right"
        return table


_COLUMNS = (
    ("tokens", "tokens", "{}"),
    ("s", "seconds", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("speed-up", "speed_up", "{:.2f}"),
    ("M", "mean_acceptance_length", "{:.2f}"),
    ("alpha", "acceptance_rate", "{:.2f}"),
    *((f"{part}\nms/step", f"ms_per_step_{part}", "{:.2f}") for part in _PARTS),
)


def compare(job: Job, method: Method, repeat: int, show: Callable[[Step], None] | None) -> tuple[Run, Comparison | None]:
    """Warm both up, then plain and method in turn, `repeat` times. The method's first run is shown and returned.

    The comparison is None where Ctrl-C came in between; the run is then what there is of the method's first one.
    """
    plain, shown, runs = Autoregressive(), Run(), ([], [])
    try:
        for one in (plain, method):
            warm_up(job, one)
    except KeyboardInterrupt:
        return Run(interrupted=True), None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* the speed of plain decoding")  # here it is measured
        for number in range(repeat):
            for kind, kept in zip((plain, method), runs, strict=True):
                first = kind is method and number == 0
                run = decode(job, kind, show if first else None)
                kept.append(run)
                if first:
                    shown = run
                if run.interrupted:
                    shown.interrupted = True
                    return shown, None
    return shown, judged(job, method, *runs)


def judged(job: Job, method: Method, plain: list[Run], other: list[Run]) -> Comparison:
    """What runs of both, made in turn, say about speed and text."""
    law_only = job.sampled and getattr(method, "rejection_sample_method", None) == "standard"
    divergence = None if law_only else first_divergence(job, plain, other)
    return Comparison(job, method, Totals("plain", plain), Totals(method.name, other), law_only, divergence)


def first_divergence(job: Job, plain: list[Run], other: list[Run]) -> Divergence | None:
    """Where the first pair of runs that differs parts; None where all pairs are token for token the same."""
    for a, b in zip(plain, other, strict=True):
        if a.tokens == b.tokens:
            continue
        shared = min(len(a.tokens), len(b.tokens))
        at = next((i for i in range(shared) if a.tokens[i] != b.tokens[i]), shared)
        ours, theirs = (run.tokens[at] if at < len(run.tokens) else None for run in (a, b))
        texts = (None if token is None else job.text([token]) for token in (ours, theirs))
        return Divergence(at, ours, theirs, *texts)
    return None
