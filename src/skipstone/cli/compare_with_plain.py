"""`--compare` and the demo: one prompt decoded alternately by a method and plainly, with the figures of both."""

import warnings
from dataclasses import asdict, dataclass
from itertools import islice, zip_longest
from typing import Any

import torch
from rich.table import Column, Table

from skipstone.cli.timed_run import Run, RunInput, Show, decode
from skipstone.decoding.method import Method
from skipstone.decoding.stats import Stats
from skipstone.lab.bench.peers.hf import HFGenerate
from skipstone.lab.timing.machine import ProcessorWatch, was_busy
from skipstone.lab.timing.measure import measure, warm_up
from skipstone.methods.autoregressive import Autoregressive

WARM_UP_STEPS = 3  # of either side of a comparison
COLUMNS = (  # of the table: title, figure, format
    ("tokens", "tokens", "{}"),
    ("s", "seconds", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("speed-up", "speed_up", "{:.2f}"),
    ("M", "mean_acceptance_length", "{:.2f}"),
    ("alpha", "acceptance_rate", "{:.2f}"),
    *((f"{part}\nms/step", f"ms_per_step_{part}", "{:.2f}") for part in ("search", "draft", "score", "other")),
)


@dataclass(frozen=True)
class FirstDifference:
    """The first place where two texts differ; a token is None if that text has ended."""

    position: int
    plain: int | None
    method: int | None
    plain_text: str | None
    method_text: str | None

    def __str__(self) -> str:
        sides = (("plain", self.plain, self.plain_text), ("method", self.method, self.method_text))
        described = ", ".join(f"{name} {'ended' if token is None else f'{token} {text!r}'}" for name, token, text in sides)
        return f"first difference at token {self.position}: {described}"


@dataclass(frozen=True)
class RunComparison:
    """Figures of plain decoding and of a method, over `repeats` runs each. waited_share: as of `ProcessorWatch`.

    law_only: the method draws its drafts with noise of their own, so that only the distributions of the texts are equal.
    """

    job: RunInput
    method: Method
    repeats: int
    plain: dict[str, Any]
    other: dict[str, Any]
    law_only: bool
    divergence: FirstDifference | None
    waited_share: float | None = None

    @property
    def speed_up(self) -> float:
        return self.other["tokens_per_second"] / self.plain["tokens_per_second"]

    def verdict(self) -> str:
        """Whether both wrote the same, in a sentence."""
        if self.law_only:
            return (
                "texts: equal in law only (temperature > 0, standard rule), so not compared; "
                "under rejection_sample_method=coupled they must be the same"
            )
        verdict = "texts identical: yes" if self.divergence is None else f"texts identical: no, {self.divergence}"
        if not self.method.lossless:
            return f"{verdict} ({self.method.name} is lossy: its text may differ)"
        if self.divergence is not None and self.job.model.dtype != torch.float32:
            return f"{verdict} (in {self.job.dtype_name} a near tie may round either way; try --dtype float32)"
        return verdict

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "repeats": self.repeats,
            "speed_up": self.speed_up,
            "identical": None if self.law_only else self.divergence is None,
            "lossless": self.method.lossless,
            "verdict": self.verdict(),
            "divergence": None if self.divergence is None else asdict(self.divergence),
            "plain": self.plain,
            "method": self.other,
            "waited_share": self.waited_share,
        }

    def table(self) -> Table:
        """A row of figures for each side."""
        rows = {"plain": self.plain | {"speed_up": 1.0}, self.method.name: self.other | {"speed_up": self.speed_up}}
        has_search = any(figures["ms_per_step_search"] for figures in rows.values())
        columns = [column for column in COLUMNS if has_search or column[1] != "ms_per_step_search"]
        table = Table("", *(Column(name, justify="right") for name, _, _ in columns))
        for name, figures in rows.items():
            cells = ("-" if figures[key] is None else form.format(figures[key]) for _, key, form in columns)
            table.add_row(name, *cells)
        return table


def compare_with_plain(
    job: RunInput, method: Method, repeats: int = 1, show: Show = None, show_plain: Show = None
) -> tuple[Run, RunComparison | None]:
    """Warm both up, then alternate plain decoding and the method. The first runs are shown.

    Returns the method's first run. After Ctrl-C there is no comparison, and the run has the tokens so far.
    """
    sides = {"plain": (Autoregressive(), show_plain), "method": (method, show)}
    runs: dict[str, list[Run]] = {"plain": [], "method": []}
    try:
        for side, _ in sides.values():  # otherwise the first run would pay for lazy set-up
            for _ in islice(job.steps(side), WARM_UP_STEPS):
                pass
    except KeyboardInterrupt:
        return Run(interrupted=True), None
    with warnings.catch_warnings(), ProcessorWatch() as watch:
        warnings.filterwarnings("ignore", message=".* the speed of plain decoding")  # it is measured here
        for number in range(repeats):
            for name, (side, show_side) in sides.items():
                run = decode(job, side, show_side if number == 0 else None)
                runs[name].append(run)
                if run.interrupted:
                    first = runs["method"][0] if runs["method"] else Run()
                    first.interrupted = True
                    return first, None
    law_only = job.is_sampled and getattr(method, "rejection_sample_method", None) == "standard"
    divergence = None if law_only else first_difference(job, *runs.values())
    plain, other = map(pooled_figures, runs.values())
    return runs["method"][0], RunComparison(job, method, repeats, plain, other, law_only, divergence, watch.waited_share)


def pooled_figures(runs: list[Run]) -> dict[str, Any]:
    """Counts and times of several runs as JSON values: total tokens over total time. M and alpha are None without drafts."""
    total = Stats.total(run.stats for run in runs)
    tokens, seconds = sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "mean_acceptance_length": total.mean_acceptance_length if total.draft_steps else None,
        "acceptance_rate": total.acceptance_rate if total.draft_steps else None,
        **{f"ms_per_step_{part}": spent for part, spent in total.step_milliseconds().items()},
    }


def first_difference(job: RunInput, plain: list[Run], other: list[Run]) -> FirstDifference | None:
    """Where the first differing pair of runs differs; None if all pairs are equal token for token."""
    for sides in zip(plain, other, strict=True):
        for position, (a, b) in enumerate(zip_longest(*(run.tokens for run in sides))):
            if a != b:
                texts = (None if token is None else job.text([token]) for token in (a, b))
                return FirstDifference(position, a, b, *texts)
    return None


def run_transformers(job: RunInput, tokens: list[int]) -> dict[str, Any]:
    """Figures of transformers' own `generate` on the same prompt, as JSON values. tokens: the text to compare with."""
    peer: Any = HFGenerate()
    warm_up(job.model, [peer], job.ids[0], job.options)
    with ProcessorWatch() as watch:
        result = measure(job.model, peer, job.ids[0], job.options, job.seed)
    return {
        "tokens": len(result.tokens),
        "seconds": result.seconds,
        "tokens_per_second": len(result.tokens) / result.seconds,
        "identical": result.tokens == tokens,
        "waited_share": watch.waited_share,
    }


def busy_warning(*waited_shares: float | None) -> str | None:
    """A warning for figures that were measured on a busy machine; None if it was idle."""
    share = max((share for share in waited_shares if share is not None), default=None)
    if share is None or not was_busy(share):
        return None
    return (
        f"the machine was busy: this process waited {100 * share:.0f} % of the time for a processor, so the speeds mean "
        "little; measure again on an idle machine"
    )
