"""A prompt decoded and timed, shown meanwhile, compared with plain decoding (`--compare` and the demo), and reported."""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby, islice, zip_longest
from typing import Any

import torch
from rich.color import ColorSystem
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.style import Style
from rich.table import Column, Table
from rich.text import Text
from torch import Tensor

import skipstone
from skipstone import __version__
from skipstone.cli import terminal
from skipstone.decoding.draft import Step
from skipstone.decoding.method import Method
from skipstone.decoding.stats import Stats
from skipstone.engines.choose_engine import copies_of
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.mtp_head import mtp_notes
from skipstone.hf.detokenizer import Detokenizer, detokenize
from skipstone.methods import spell
from skipstone.methods.autoregressive import Autoregressive
from skipstone.utils.processor_watch import ProcessorWatch, busy_warning
from skipstone.utils.setup_times import SetupSeconds

Show = Callable[[Step], None] | None
"""Called with every step of a run."""


@dataclass(frozen=True)
class RunInput:
    """A model and a prompt. ids: [1, T] int64. options: keyword arguments of `skipstone.generate`. seed: the same for every
    run."""

    model: Any
    tokenizer: Any
    ids: Tensor
    options: dict[str, Any]
    seed: int

    @property
    def is_sampled(self) -> bool:
        return bool(self.options["do_sample"])

    @property
    def dtype_name(self) -> str:
        """The dtype of the weights as the command line spells it, such as "float32"."""
        return str(self.model.dtype).removeprefix("torch.")

    def steps(self, method: Method) -> Iterator[Step]:
        """The steps of one decoding."""
        options = {"attention_mask": torch.ones_like(self.ids), **self.options, "num_return_sequences": 1}
        return skipstone.stream(self.model, self.ids, method, tokenizer=self.tokenizer, seed=self.seed, **options)

    def text(self, tokens: list[int]) -> str:
        """The text of new tokens."""
        return detokenize(self.tokenizer, tokens, self.ids[0].tolist())


@dataclass
class Run:
    """One decoding of a prompt. waited_share: as of `ProcessorWatch`."""

    tokens: list[int] = field(default_factory=list)
    origin: list[str] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    interrupted: bool = False
    steps: list[Step] = field(default_factory=list)
    waited_share: float | None = None

    @property
    def seconds(self) -> float:
        """Time from the call to the last token, without the time of showing text."""
        return self.stats.seconds_total

    def finish_reason(self, job: RunInput) -> str:
        """Why the run ended: "interrupted", "eos", "stop" (a stop string) or "length"."""
        if self.interrupted:
            return "interrupted"
        own: Any = job.model.generation_config
        eos = job.options.get("eos_token_id", own.eos_token_id)
        if self.tokens and self.tokens[-1] in (eos if isinstance(eos, list) else [eos]):
            return "eos"
        stops = job.options.get("stop_strings") or own.stop_strings or []
        stops = [stops] if isinstance(stops, str) else stops
        if len(self.tokens) < job.options["max_new_tokens"] or any(stop in job.text(self.tokens) for stop in stops):
            return "stop"
        return "length"


def decode(job: RunInput, method: Method, show: Show = None) -> Run:
    """Decode a prompt to its end or to Ctrl-C."""
    return collect_run(lambda: job.steps(method), show)


def collect_run(begin: Callable[[], Iterator[Step]], show: Show = None) -> Run:
    """A run of the steps that `begin` starts, to their end or to Ctrl-C, which keeps the tokens so far."""
    run = Run()
    with ProcessorWatch() as watch:
        try:
            for step in begin():
                run.tokens += step.tokens[0]
                run.origin += step.origin[0]
                run.stats.add(step)
                run.steps.append(step)
                if show is not None:
                    show(step)
        except KeyboardInterrupt:
            run.interrupted = True
    run.waited_share = watch.waited_share
    return run


WARM_UP_STEPS = 3  # of either side of a comparison
MIN_SHOWN_SECONDS = 0.005  # of a part of the set-up work
MIN_SHOWN_MS = 0.005  # of the search in a step
COLUMNS = (  # of the table: title, figure, format
    ("tokens", "tokens", "{}"),
    ("s", "seconds", "{:.2f}"),
    ("tokens/s", "tokens_per_second", "{:.1f}"),
    ("speed-up", "speed_up", "{:.2f}"),
    ("M", "mean_acceptance_length", "{:.2f}"),
    ("alpha", "acceptance_rate", "{:.2f}"),
    *((f"{part}\nms/step", f"ms_per_step_{part}", "{:.2f}") for part in ("search", "draft", "score", "other")),
)


class RunComparison:
    """Figures of plain decoding and of a method, over as many runs each after a warm-up. waited_share: as of `ProcessorWatch`.

    first_speed_up: of a run with the set-up work of the warm-up, over plain decoding without any.

    law_only: the method draws its drafts with noise of their own, so that only the distributions of the texts are equal.
    divergence: see `first_difference`.
    """

    def __init__(
        self,
        job: RunInput,
        method: Method,
        runs: dict[str, list[Run]],
        setups: dict[str, SetupSeconds],
        waited_share: float | None,
    ) -> None:
        plain, own = runs["plain"], runs["method"]
        self.job, self.method, self.repeats, self.waited_share = job, method, len(plain), waited_share
        self.plain, self.own = pooled_figures(plain, setups["plain"]), pooled_figures(own, setups["method"])
        self.speed_up: float = self.own["tokens_per_second"] / self.plain["tokens_per_second"]
        first_rate = self.own["tokens"] / self.repeats / self.own["first_seconds"]
        self.first_speed_up: float = first_rate / self.plain["tokens_per_second"]
        self.law_only = job.is_sampled and getattr(method, "rejection_sample_method", None) == "standard"
        self.divergence = None if self.law_only else first_difference(job, plain, own)

    def verdict(self) -> str:
        """Whether both wrote the same, in a sentence."""
        if self.law_only:
            why = "equal in law only (temperature > 0, standard rule), so not compared"
            return f"texts: {why}; under rejection_sample_method=coupled they must be the same"
        if self.divergence is None:
            verdict = "texts identical: yes"
        else:
            found = self.divergence
            plain, own = (f"{side} {_spell_token(found[side], found[f'{side}_text'])}" for side in ("plain", "method"))
            verdict = f"texts identical: no, first difference at token {found['position']}: {plain}, {own}"
        if not self.method.lossless:
            return f"{verdict} ({self.method.name} is lossy: its text may differ)"
        if self.divergence is not None and self.job.model.dtype != torch.float32:
            return f"{verdict} (in {self.job.dtype_name} a near tie may round either way; try --dtype float32)"
        return verdict

    def first_sentence(self) -> str:
        """The speed-up of a first request, and the method's set-up work."""
        first = f"first request {self.own['first_seconds']:.2f} s, {self.first_speed_up:.2f} x plain"
        return f"{first}, with {setup_sentence(self.own['setup'])}"

    def document(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "repeats": self.repeats,
            "speed_up": self.speed_up,
            "first_speed_up": self.first_speed_up,
            "identical": None if self.law_only else self.divergence is None,
            "lossless": self.method.lossless,
            "verdict": self.verdict(),
            "divergence": self.divergence,
            "plain": self.plain,
            "method": self.own,
            "waited_share": self.waited_share,
        }

    def table(self) -> Table:
        """A row of figures for each side."""
        rows = {"plain": self.plain | {"speed_up": 1.0}, self.method.name: self.own | {"speed_up": self.speed_up}}
        has_search = any(figures["ms_per_step_search"] >= MIN_SHOWN_MS for figures in rows.values())
        columns = [column for column in COLUMNS if has_search or column[1] != "ms_per_step_search"]
        table = Table("", *(Column(name, justify="right") for name, _, _ in columns), title="after a warm-up")
        for name, figures in rows.items():
            cells = ("-" if figures[key] is None else form.format(figures[key]) for _, key, form in columns)
            table.add_row(name, *cells)
        return table


def compare_with_plain(
    job: RunInput, method: Method, repeats: int = 1, show: Show = None, show_plain: Show = None
) -> tuple[Run, RunComparison | None]:
    """Warm both up, which does their set-up work, then alternate plain decoding and the method. The first runs are shown.

    Returns the method's first run. After Ctrl-C there is no comparison, and the run has the tokens so far.
    """
    sides = {"plain": (Autoregressive(), show_plain), "method": (method, show)}
    runs: dict[str, list[Run]] = {"plain": [], "method": []}
    setups: dict[str, SetupSeconds] = {}
    ModelRunner(job.model)  # the warm-up of plain decoding shall not prepare the model for both
    for name, (side, _) in sides.items():
        run = collect_run(lambda side=side: islice(job.steps(side), WARM_UP_STEPS))
        if run.interrupted:
            return Run(interrupted=True), None
        setups[name] = run.stats.setup
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
    return runs["method"][0], RunComparison(job, method, runs, setups, watch.waited_share)


def pooled_figures(runs: list[Run], setup: SetupSeconds) -> dict[str, Any]:
    """Counts and times of several runs as JSON values: total tokens over total time. M and alpha are None without drafts.

    setup: seconds of set-up work of the first call. first_seconds: a mean run with that set-up work instead of its own."""
    total = Stats.total(run.stats for run in runs)
    tokens, seconds = sum(len(run.tokens) for run in runs), sum(run.seconds for run in runs)
    return {
        "tokens": tokens,
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "first_seconds": sum(setup.values()) + (seconds - total.seconds_setup) / len(runs),
        "setup": setup,
        "mean_acceptance_length": total.mean_acceptance_length if total.draft_steps else None,
        "acceptance_rate": total.acceptance_rate if total.draft_steps else None,
        **{f"ms_per_step_{part}": spent for part, spent in total.step_milliseconds().items()},
    }


def first_difference(job: RunInput, plain: list[Run], own: list[Run]) -> dict[str, Any] | None:
    """Where the first differing pair of runs differs, as JSON values; None if all pairs are equal token for token. A token is
    None if that text has ended."""
    for sides in zip(plain, own, strict=True):
        for position, (a, b) in enumerate(zip_longest(*(run.tokens for run in sides))):
            if a != b:
                texts = (None if token is None else job.text([token]) for token in (a, b))
                tokens = {"position": position, "plain": a, "method": b}
                return tokens | dict(zip(("plain_text", "method_text"), texts, strict=True))
    return None


def _spell_token(token: int | None, text: str | None) -> str:
    return "ended" if token is None else f"{token} {text!r}"


def run_transformers(job: RunInput, tokens: list[int]) -> dict[str, Any]:
    """Figures of transformers' own `generate` on the same prompt, as JSON values. tokens: the text to compare with."""
    from skipstone.lab.bench.peers.hf import HFGenerate
    from skipstone.lab.timing.measure import measure, warm_up

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


def setup_sentence(setup: SetupSeconds) -> str:
    """The set-up work and its seconds. Parts under 5 ms are left out."""
    parts = sorted(((seconds, name) for name, seconds in setup.items() if seconds >= MIN_SHOWN_SECONDS), reverse=True)
    names = ", ".join(f"{name} {seconds:.2f} s" for seconds, name in parts)
    return f"set-up {sum(setup.values()):.2f} s{names and ': '}{names}"


def figure_lines(job: RunInput, method: Method, run: Run) -> list[str]:
    """The run in four or more lines."""
    stats, report = run.stats, method.report(job.model)
    whole, steady = _speed_up_clauses(stats, report)
    lines = [
        f"{spell(method)}: {'' if method.lossless else 'lossy, '}"
        f"{job.ids.shape[1]} prompt tokens, {len(run.tokens)} new in {run.seconds:.2f} s, "
        f"{stats.tokens_per_second:.1f} tokens/s{whole}, ended by {run.finish_reason(job)}",
        f"steady {stats.steady_tokens_per_second:.1f} tokens/s{steady}; {setup_sentence(stats.setup)}; "
        f"prefill {stats.seconds_prefill:.2f} s",
    ]
    drafts = ""
    if stats.draft_steps:
        accepted = f"{stats.accepted} of {stats.draft_steps} drafts accepted"
        drafts = f": M {stats.mean_acceptance_length:.2f} tokens a step, alpha {stats.acceptance_rate:.2f} ({accepted})"
    parts = [f"{name} {ms:.2f}" for name, ms in stats.step_milliseconds().items() if name != "search" or ms >= MIN_SHOWN_MS]
    lines.append(f"{stats.steps} steps{drafts}; ms a step: {', '.join(parts)}")
    if stats.drafters:
        drafters = ", ".join(f"{name} {count}" for name, count in stats.drafters.most_common())
        searched = stats.seconds_search / stats.seconds if stats.seconds else 0.0
        lines.append(f"turns by what drafted: {drafters}; {100 * searched:.1f} % of the time for offline evaluation")
    if stats.drafted and "overruled" in report:
        distances = ", ".join(f"{name} {value:.3f}" for name, value in mean_distances(report).items())
        distances = distances and f"; mean JS distance: {distances}"
        lines.append(f"{stats.overruled} of {len(run.tokens)} tokens overruled the model{distances}")
    runner = ModelRunner(job.model)
    reason = "" if runner.engine_reason is None else f" (not native: {runner.engine_reason})"
    kv_dtype = "" if runner.kv_dtype is None else f", keys and values kept in {runner.engine_options.kv_dtype}"
    lines.append(f"engine {runner.engine.name}: {runner.engine.detail}{kv_dtype}{reason}")
    lines += [*mtp_notes(runner), *method.notes(runner)]
    if job.is_sampled:
        lines.append(f"seed {job.seed}")
    warning = busy_warning(run.waited_share)
    return lines if warning is None else [*lines, warning]


def _speed_up_clauses(stats: Stats, report: dict[str, Any]) -> tuple[str, str]:
    """How fast a run of `auto` was, compared with plain decoding: with everything, and steady."""
    if not stats.seconds or "plain_interval" not in report:
        return "", ""
    plain_seconds, (low, high) = report["plain_seconds"], map(stats.steady_speed_up, report["plain_interval"])
    interval = f"({low:.2f} to {high:.2f})"
    if not stats.drafted and stats.turns:  # then all steps have timed plain decoding
        plain_seconds, interval = (stats.seconds_score + stats.seconds_other) / stats.turns, "(nothing drafted)"
    steady = f", {stats.steady_speed_up(plain_seconds):.2f} x plain decoding {interval}, whose step takes"
    return f", {stats.speed_up(plain_seconds):.2f} x plain decoding", f"{steady} {1000 * plain_seconds:.2f} ms"


def decision_table(steps: list[Step]) -> Table:
    """Why every step drafted as it did. Neighbouring steps with the same reason share a row."""
    table = Table("at token", "steps", "drafter", "drafted", "accepted", "because", title="decisions")
    position = 0
    for (drafter, reason), group in groupby((step for step in steps if step.drafter), lambda step: (step.drafter, step.reason)):
        members = list(group)
        drafted, accepted = sum(sum(step.drafted) for step in members), sum(sum(step.accepted) for step in members)
        table.add_row(str(position), str(len(members)), drafter, str(drafted), str(accepted), reason)
        position += sum(len(step.tokens[0]) for step in members)
    return table


def mean_distances(report: dict[str, Any]) -> dict[str, float]:
    """Mean Jensen-Shannon distances of accepted and rejected drafts, if the method's report has them."""
    means = report.get("means", {})
    figures = {name: means.get(f"distance_{name}", {}) for name in ("accepted", "rejected")}
    return {name: figure["sum"] / figure["count"] for name, figure in figures.items() if figure.get("count")}


def run_document(model: str | None, job: RunInput, method: Method, run: Run, compared: RunComparison | None) -> dict[str, Any]:
    """The JSON document of --json."""
    runner = ModelRunner(job.model)
    return {
        "skipstone": __version__,
        "model": model,
        "dtype": job.dtype_name,
        "device": str(job.ids.device),
        "engine": runner.engine.name,
        "engine_reason": runner.engine_reason,
        "quantize": runner.engine.quantize,
        "compute_dtype": runner.engine.compute_dtype,
        "kv_dtype": runner.engine_options.kv_dtype,
        "extra_memory_bytes": sum(copies_of(runner.model).values()),
        "method": {"method": method.name, **method.settings},
        "lossless": method.lossless,
        **({} if method.lossless else {"mean_js_distance": mean_distances(method.report(job.model))}),
        "decoding": {**job.options, "seed": job.seed if job.is_sampled else None},
        "prompt_tokens": job.ids.shape[1],
        "text": job.text(run.tokens),
        "tokens": run.tokens,
        "origin": run.origin,
        "finish_reason": run.finish_reason(job),
        "seconds": run.seconds,
        "stats": run.stats.summary(),
        "waited_share": run.waited_share,
        "comparison": None if compared is None else compared.document(),
    }


ACCEPTED = Style(color="green", underline=True)  # underlined too, because not everybody sees colour


class TokenPrinter:
    """Writes text to stdout token by token. color: mark accepted drafts; None marks them if stdout is a terminal.

    A character that consists of several tokens has the origin of the last one.
    """

    def __init__(self, job: RunInput, color: bool | None) -> None:
        self.out = sys.stdout
        self.on_terminal = self.out.isatty()
        shows_color = self.on_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self.color = shows_color if color is None else color
        self.detokenizer = Detokenizer(job.tokenizer, job.ids[0].tolist())
        self.origin = ""
        self.is_mid_line = False

    def show(self, step: Step) -> None:
        """Write the tokens of a step."""
        for token, self.origin in zip(step.tokens[0], step.origin[0], strict=True):
            self._write(self.detokenizer.add(token))
        self.out.flush()

    def end(self, legend: bool = True, more: bool = False) -> None:
        """Write the text that was held back. A terminal gets a line end; elsewhere stdout holds the text and nothing else.

        legend: explain the marks, if there are any. more: further lines follow on stderr, which may be the same place.
        """
        self._write(self.detokenizer.rest())
        if self.on_terminal:
            self.out.write("\n")
        self.out.flush()
        has_legend = self.color and legend
        if (has_legend or more) and self.is_mid_line and not self.on_terminal:
            print(file=sys.stderr)
        if has_legend:
            sample = _mark("accepted draft")
            print(f"{sample}: drafted and confirmed; plain: the full model's own (first, recovered, bonus)", file=sys.stderr)

    def _write(self, piece: str) -> None:
        if piece:
            self.is_mid_line = not piece.endswith("\n")
        if self.on_terminal or self.color:
            piece = terminal.harmless(piece)
        if self.color and self.origin == "draft":  # a marked line break would underline the rest of the line on some terminals
            piece = "\n".join(map(_mark, piece.split("\n")))
        self.out.write(piece)


def _mark(text: str) -> str:
    return ACCEPTED.render(text, color_system=ColorSystem.STANDARD)


FRAME_SECONDS = 1 / 15  # between two pictures


class DemoColumn:
    """One side of the demo: the text so far, accepted drafts marked. refresh: called after every step."""

    def __init__(self, job: RunInput, title: str, refresh: Callable[[], None]) -> None:
        self.title, self.refresh, prompt = title, refresh, job.ids[0].tolist()
        self.detokenizer = Detokenizer(job.tokenizer, prompt)
        self.text = Text().append(terminal.harmless(detokenize(job.tokenizer, prompt)), style="dim")

    def show(self, step: Step) -> None:
        """Add the tokens of a step."""
        for token, origin in zip(step.tokens[0], step.origin[0], strict=True):
            piece = terminal.harmless(self.detokenizer.add(token))
            self.text.append(piece, style=ACCEPTED if origin == "draft" else None)
        self.refresh()


def show_side_by_side(
    console: Console, job: RunInput, method: Method, title: str, recorder: Console | None
) -> tuple[RunComparison, dict[str, Any]]:
    """Show a prompt of the demo: both texts, then the figures, those of transformers included. No time includes the display.

    recorder: a console that gets the last picture only. KeyboardInterrupt for Ctrl-C.
    """
    last_frame = 0.0

    def picture() -> Table:
        table = Table.grid(expand=True)
        for _ in sides:
            table.add_column(ratio=1)
        table.add_row(*(Panel(side.text, title=side.title, title_align="left") for side in sides))
        return table

    def refresh() -> None:
        nonlocal last_frame
        if (now := time.monotonic()) - last_frame >= FRAME_SECONDS:
            live.update(picture(), refresh=True)
            last_frame = now

    sides = [DemoColumn(job, "plain", refresh), DemoColumn(job, f"{method.name}: accepted drafts underlined", refresh)]
    console.rule(title)
    with Live(picture(), console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        run, comparison = compare_with_plain(job, method, show=sides[1].show, show_plain=sides[0].show)
        if comparison is None:
            raise KeyboardInterrupt
        for side in sides:
            side.text.append(terminal.harmless(side.detokenizer.rest()))
        live.update(picture(), refresh=True)
    if not console.is_terminal:
        console.print(picture())
    theirs = run_transformers(job, run.tokens)
    figures = _figures_sentence(comparison, theirs)
    console.print(figures)
    if recorder is not None:
        recorder.rule(title)
        recorder.print(picture(), figures, sep="\n")
    return comparison, theirs


def _figures_sentence(comparison: RunComparison, theirs: dict[str, Any]) -> str:
    plain, own, name = comparison.plain, comparison.own, comparison.method.name
    drafts = "nothing drafted"
    if own["acceptance_rate"] is not None:
        drafts = f"M {own['mean_acceptance_length']:.2f} tokens a step, alpha {own['acceptance_rate']:.2f}"
    rates = [side["tokens_per_second"] for side in (theirs, plain, own)]
    sentence = (
        f"tokens/s after a warm-up: transformers {rates[0]:.0f}, plain {rates[1]:.0f}, {name} {rates[2]:.0f}; {name} is "
        f"{rates[2] / rates[0]:.1f} x transformers, {comparison.speed_up:.2f} x plain; {comparison.first_sentence()}; "
        f"{drafts}; {comparison.verdict()}{'' if theirs['identical'] else ' (transformers wrote another text)'}"
    )
    warning = busy_warning(comparison.waited_share, theirs["waited_share"])
    return sentence if warning is None else f"{sentence}; {warning}"
