"""A prompt decoded and timed, and the same prompt decoded by a method and plainly in turn: `generate`, `--compare`, `demo`."""

import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from rich.table import Column, Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import skipstone
from skipstone.decoding.draft import Step
from skipstone.decoding.method import Method
from skipstone.decoding.stats import Stats
from skipstone.hf.detokenizer import detokenize
from skipstone.lab.bench.peers.hf import HFGenerate
from skipstone.lab.timing.machine import ProcessorWatch, was_busy
from skipstone.lab.timing.measure import measure, warm_up
from skipstone.methods.autoregressive import Autoregressive

Show = Callable[[Step], None] | None  # what is called with every step of a run
WARM_UP_STEPS = 3  # of either side of a comparison, thrown away
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
class RunInput:
    """What is decoded. ids: [1, T] int64. options: `GenerationConfig` fields. seed: the same for every run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ids: Tensor
    options: dict[str, Any]
    seed: int

    @property
    def sampled(self) -> bool:
        return bool(self.options["do_sample"])

    def steps(self, method: Method) -> Iterator[Step]:
        options = {"attention_mask": torch.ones_like(self.ids), **self.options, "num_return_sequences": 1}
        return skipstone.stream(self.model, self.ids, method, tokenizer=self.tokenizer, seed=self.seed, **options)

    def text(self, tokens: list[int]) -> str:
        """Of new tokens."""
        return detokenize(self.tokenizer, tokens, self.ids[0].tolist())


@dataclass
class Run:
    """One decoding of a job. seconds: wall-clock from the call to the last token, the time spent on showing text left out."""

    tokens: list[int] = field(default_factory=list)
    origin: list[str] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    interrupted: bool = False
    steps: list[Step] = field(default_factory=list)


def decode(job: RunInput, method: Method, show: Show = None) -> Run:
    """Decode a job to its end, or to Ctrl-C, which ends the run and keeps what there is."""
    return follow(lambda: job.steps(method), show)


def follow(begin: Callable[[], Iterator[Step]], show: Show = None) -> Run:
    """A run of the steps that `begin` starts, to their end or to Ctrl-C."""
    run = Run()
    try:
        started = time.perf_counter()
        steps = begin()
        while True:
            step = next(steps, None)
            run.seconds += time.perf_counter() - started
            if step is None:
                return run
            run.tokens += step.tokens[0]
            run.origin += step.origin[0]
            run.stats.add(step)
            run.steps.append(step)
            if show is not None:
                show(step)
            started = time.perf_counter()
    except KeyboardInterrupt:
        run.interrupted = True
        return run


def finish_reason(run: Run, job: RunInput) -> str:
    """Why a run ended: "interrupted", "eos", "stop" (a stop string) or "length"."""
    if run.interrupted:
        return "interrupted"
    ends = job.options.get("eos_token_id", job.model.generation_config.eos_token_id)  # type: ignore[union-attr]
    if run.tokens and run.tokens[-1] in (ends if isinstance(ends, list) else [ends]):
        return "eos"
    own: Any = job.model.generation_config
    stops = job.options.get("stop_strings") or own.stop_strings or []
    stops = [stops] if isinstance(stops, str) else stops
    if len(run.tokens) < job.options["max_new_tokens"] or any(stop in job.text(run.tokens) for stop in stops):
        return "stop"
    return "length"


def dtype_name(model: PreTrainedModel) -> str:
    """The dtype of the weights as the command line spells it: "float32"."""
    return str(model.dtype).removeprefix("torch.")


def pooled(runs: list[Run]) -> dict[str, Any]:
    """Runs of one method as counts and times in plain JSON values: total tokens over total time, never a mean of means. alpha
    and M are None where nothing was drafted."""
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


@dataclass(frozen=True)
class FirstDifference:
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
class RunComparison:
    """plain and other: the pooled runs, run i of plain decoding next to run i of the method. law_only: the same text was not to
    be expected, so none was looked for; else divergence says where the texts part, None where they are identical. waited_share:
    of the time of the runs, as `ProcessorWatch` has it."""

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
        rows = {"plain": self.plain | {"speed_up": 1.0}, self.method.name: self.other | {"speed_up": self.speed_up}}
        searched = any(figures["ms_per_step_search"] for figures in rows.values())
        columns = [one for one in COLUMNS if one[1] != "ms_per_step_search" or searched]
        table = Table("", *(Column(name, justify="right") for name, _, _ in columns))
        for name, figures in rows.items():
            cells = ["-" if figures[key] is None else form.format(figures[key]) for _, key, form in columns]
            table.add_row(name, *cells)
        return table


def compared(
    job: RunInput, method: Method, repeat: int = 1, show: Show = None, show_plain: Show = None
) -> tuple[Run, RunComparison | None]:
    """Warm both up, then decode plainly and with the method in turn, `repeat` times. The first runs are shown.

    Returns the method's first run. The comparison is None where Ctrl-C came in between; the run is then what there is.
    """
    plain, runs = Autoregressive(), ([], [])
    try:
        for one in (plain, method):  # lazy set-up is paid here and not by whoever is timed first
            for _ in islice(job.steps(one), WARM_UP_STEPS):
                pass
    except KeyboardInterrupt:
        return Run(interrupted=True), None
    with warnings.catch_warnings(), ProcessorWatch() as watch:
        warnings.filterwarnings("ignore", message=".* the speed of plain decoding")  # here it is measured
        for number in range(repeat):
            for one, shown, kept in zip((plain, method), (show_plain, show), runs, strict=True):
                kept.append(decode(job, one, shown if number == 0 else None))
                if kept[-1].interrupted:
                    first = runs[1][0] if runs[1] else Run()
                    first.interrupted = True
                    return first, None
    law_only = job.sampled and getattr(method, "rejection_sample_method", None) == "standard"
    divergence = None if law_only else first_divergence(job, *runs)
    both = pooled(runs[0]), pooled(runs[1])
    return runs[1][0], RunComparison(job, method, repeat, *both, law_only, divergence, watch.waited_share)


def busy_warning(*waited_shares: float | None) -> str | None:
    """A warning for figures that were measured on a busy machine; None if it was idle."""
    most = max((share for share in waited_shares if share is not None), default=None)
    if most is None or not was_busy(most):
        return None
    return (
        f"the machine was busy: this process waited {100 * most:.0f} % of the time for a processor, so the speeds mean little; "
        "measure again on an idle machine"
    )


def by_transformers(job: RunInput, tokens: list[int]) -> dict[str, Any]:
    """The same prompt by transformers' own `generate`, warmed up, as plain JSON values. tokens: the text that it is compared
    with."""
    peer: Any = HFGenerate()
    warm_up(job.model, [peer], job.ids[0], job.options)
    with ProcessorWatch() as watch:
        found = measure(job.model, peer, job.ids[0], job.options, job.seed)
    pace = len(found.tokens) / found.seconds
    return {
        "tokens": len(found.tokens),
        "seconds": found.seconds,
        "tokens_per_second": pace,
        "identical": found.tokens == tokens,
        "waited_share": watch.waited_share,
    }


def first_divergence(job: RunInput, plain: list[Run], other: list[Run]) -> FirstDifference | None:
    """Where the first pair of runs that differs parts; None where all pairs are token for token the same."""
    for a, b in zip(plain, other, strict=True):
        if a.tokens == b.tokens:
            continue
        shared = min(len(a.tokens), len(b.tokens))
        at = next((i for i in range(shared) if a.tokens[i] != b.tokens[i]), shared)
        ours, theirs = (run.tokens[at] if at < len(run.tokens) else None for run in (a, b))
        texts = (None if token is None else job.text([token]) for token in (ours, theirs))
        return FirstDifference(at, ours, theirs, *texts)
    return None
