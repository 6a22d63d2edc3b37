"""What a user sees of a run: text on stdout while it is made, a legend, figures, a table, one JSON document, or the demo."""

import os
import sys
import time
from collections.abc import Callable
from itertools import groupby
from typing import Any

from rich.color import ColorSystem
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.style import Style
from rich.table import Table
from rich.text import Text

from skipstone import __version__
from skipstone.cli import terminal
from skipstone.cli.runs import Run, RunComparison, RunInput, busy_warning, by_transformers, compared, dtype_name, finish_reason
from skipstone.decoding.draft import Step
from skipstone.decoding.method import Method
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.detokenizer import Detokenizer, detokenize
from skipstone.methods import spell

ACCEPTED = Style(color="green", underline=True)  # underlined too: colour alone does not reach everybody
FRAME = 1 / 15  # seconds between two pictures of the demo


class TokenPrinter:
    """Writes text to stdout token by token. color: mark accepted drafts; None marks them where stdout is a terminal.

    A character that several tokens share takes the origin of the last of them.
    """

    def __init__(self, job: RunInput, color: bool | None) -> None:
        self.out = sys.stdout
        self.on_terminal = self.out.isatty()
        wanted = self.on_terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self.color = wanted if color is None else color
        self.detokenizer = Detokenizer(job.tokenizer, job.ids[0].tolist())
        self.origin = ""
        self.is_mid_line = False

    def show(self, step: Step) -> None:
        for token, self.origin in zip(step.tokens[0], step.origin[0], strict=True):
            self._write(self.detokenizer.add(token))
        self.out.flush()

    def end(self, legend: bool = True, more: bool = False) -> None:
        """Write what was held back, and on a terminal end the line. Elsewhere stdout holds the text and nothing else. legend:
        say what the marks mean, where there are any. more: further lines follow on stderr, which may be the same place."""
        self._write(self.detokenizer.rest())
        if self.on_terminal:
            self.out.write("\n")
        self.out.flush()
        has_legend = self.color and legend
        if (has_legend or more) and self.is_mid_line and not self.on_terminal:
            print(file=sys.stderr)
        if has_legend:
            sample = ACCEPTED.render("accepted draft", color_system=ColorSystem.STANDARD)
            print(f"{sample}: drafted and confirmed; plain: the full model's own (first, recovered, bonus)", file=sys.stderr)

    def _write(self, piece: str) -> None:
        if piece:
            self.is_mid_line = not piece.endswith("\n")
        if self.on_terminal or self.color:
            piece = terminal.harmless(piece)
        if self.color and self.origin == "draft":
            lines = piece.split("\n")  # a marked line break would underline the rest of the line on some terminals
            piece = "\n".join(ACCEPTED.render(line, color_system=ColorSystem.STANDARD) for line in lines)
        self.out.write(piece)


def tell(job: RunInput, method: Method, run: Run, comparison: RunComparison | None, stats: bool, explain: bool = False) -> None:
    """Figures and decisions, where they are asked for, and the comparison's table, on stderr."""
    console = terminal.console(stderr=True)
    for line in figures(job, method, run) if stats else []:
        console.print(Text(line), soft_wrap=True)
    if explain:
        console.print(explained(run.steps) if run.stats.drafters else f"{method.name} decides nothing: there is no choice")
    if comparison is not None:
        console.print(comparison.table())
        if (warning := busy_warning(comparison.waited_share)) is not None:
            console.print(Text(warning), soft_wrap=True)
        console.print(Text(comparison.verdict()), soft_wrap=True)


def figures(job: RunInput, method: Method, run: Run) -> list[str]:
    """The run in three or more lines."""
    stats = run.stats
    pace = len(run.tokens) / run.seconds if run.seconds else 0.0
    lines = [
        f"{spell(method)}: {'' if method.lossless else 'lossy, '}"
        f"{job.ids.shape[1]} prompt tokens, {len(run.tokens)} new in {run.seconds:.2f} s ({stats.seconds_prefill:.2f} s of it "
        f"prefill), {pace:.1f} tokens/s, ended by {finish_reason(run, job)}"
    ]
    drafts = ""
    if stats.draft_steps:
        drafts = (
            f": M {stats.mean_acceptance_length:.2f} tokens a step, alpha {stats.acceptance_rate:.2f} "
            f"({stats.accepted} of {stats.draft_steps} drafts accepted)"
        )
    spent = [f"{name} {one:.2f}" for name, one in stats.step_milliseconds().items() if name != "search" or one]
    lines.append(f"{stats.steps} steps{drafts}; ms a step: {', '.join(spent)}")
    if stats.drafters:
        lines.append(choices(method, job, run))
    if not method.lossless and stats.drafted:
        near = ", ".join(f"{name} {value:.3f}" for name, value in distances(method, job).items())
        lines.append(
            f"{stats.overruled} of {len(run.tokens)} tokens overruled the model{near and '; mean JS distance: '}{near}"
        )
    runner = ModelRunner(job.model)
    why = "" if runner.engine_reason is None else f" (not native: {runner.engine_reason})"
    kept = "" if runner.kv_dtype is None else f", keys and values kept in {runner.asked.kv_dtype}"
    lines.append(f"engine {runner.engine.name}: {runner.engine.detail}{kept}{why}")
    if job.sampled:
        lines.append(f"seed {job.seed}")
    return lines


def choices(method: Method, job: RunInput, run: Run) -> str:
    """What drafted, and what that came to beside plain decoding."""
    stats, known = run.stats, method.report(job.model)
    drafted = ", ".join(f"{name} {count}" for name, count in stats.drafters.most_common())
    said = f"turns by what drafted: {drafted}"
    if stats.seconds and known:
        low, high = (stats.tokens * plain / stats.seconds for plain in known["plain_interval"])
        plain, shadows = known["plain_seconds"], 100 * stats.seconds_search / stats.seconds
        said += (
            f"; {stats.tokens * plain / stats.seconds:.2f} x plain decoding ({low:.2f} to {high:.2f}), whose step takes "
            f"{1000 * plain:.2f} ms; {shadows:.1f} % of the time spent on shadows"
        )
    return said


def explained(steps: list[Step]) -> Table:
    """Why every step did what it did, steps of one reason in a row together."""
    table = Table("at token", "steps", "drafter", "drafted", "accepted", "because", title="decisions")
    place = 0
    for (drafter, reason), group in groupby((step for step in steps if step.drafter), lambda step: (step.drafter, step.reason)):
        found = list(group)
        drafts, accepted = sum(sum(step.drafted) for step in found), sum(sum(step.accepted) for step in found)
        table.add_row(str(place), str(len(found)), drafter, str(drafts), str(accepted), reason)
        place += sum(len(step.tokens[0]) for step in found)
    return table


def distances(method: Method, job: RunInput) -> dict[str, float]:
    """Mean Jensen-Shannon distances of accepted and rejected drafts, where the method knows them."""
    known = method.report(job.model).get("means", {})
    names = {"accepted": "distance_accepted", "rejected": "distance_rejected"}
    return {name: known[one]["sum"] / known[one]["count"] for name, one in names.items() if known.get(one, {}).get("count")}


def document(model: str | None, job: RunInput, method: Method, run: Run, comparison: RunComparison | None) -> dict[str, Any]:
    """The one JSON document of --json."""
    runner = ModelRunner(job.model)
    return {
        "skipstone": __version__,
        "model": model,
        "dtype": dtype_name(job.model),
        "device": str(job.ids.device),
        "engine": runner.engine.name,
        "engine_reason": runner.engine_reason,
        "quantize": runner.engine.quantize,
        "kv_dtype": runner.asked.kv_dtype,
        "method": {"method": method.name, **method.settings},
        "lossless": method.lossless,
        **({} if method.lossless else {"mean_js_distance": distances(method, job)}),
        "decoding": {**job.options, "seed": job.seed if job.sampled else None},
        "prompt_tokens": job.ids.shape[1],
        "text": job.text(run.tokens),
        "tokens": run.tokens,
        "origin": run.origin,
        "finish_reason": finish_reason(run, job),
        "seconds": run.seconds,
        "stats": run.stats.summary(),
        "comparison": None if comparison is None else comparison.document(),
    }


class DemoColumn:
    """One side of the demo: the text so far, accepted drafts marked. changed: called with every step."""

    def __init__(self, job: RunInput, title: str, changed: Callable[[], None]) -> None:
        self.title, self.changed, prompt = title, changed, job.ids[0].tolist()
        self.detokenizer = Detokenizer(job.tokenizer, prompt)
        self.text = Text().append(terminal.harmless(detokenize(job.tokenizer, prompt)), style="dim")

    def show(self, step: Step) -> None:
        for token, origin in zip(step.tokens[0], step.origin[0], strict=True):
            piece = terminal.harmless(self.detokenizer.add(token))
            self.text.append(piece, style=ACCEPTED if origin == "draft" else None)
        self.changed()


def side_by_side(
    console: Console, job: RunInput, method: Method, title: str, camera: Console | None
) -> tuple[RunComparison, dict[str, Any]]:
    """A scene of the demo: both texts, live where there is a terminal, then the figures, transformers' own too. Nobody's
    time has the showing in it.

    camera: a console that is shown the end only. KeyboardInterrupt for Ctrl-C.
    """
    last = 0.0

    def picture() -> Table:
        table = Table.grid(expand=True)
        for _ in sides:
            table.add_column(ratio=1)
        table.add_row(*(Panel(side.text, title=side.title, title_align="left") for side in sides))
        return table

    def frame() -> None:
        nonlocal last
        if (now := time.monotonic()) - last >= FRAME:
            live.update(picture(), refresh=True)
            last = now

    sides = [DemoColumn(job, "plain", frame), DemoColumn(job, f"{method.name}: accepted drafts underlined", frame)]
    console.rule(title)
    with Live(picture(), console=console, auto_refresh=False, transient=not console.is_terminal) as live:
        run, comparison = compared(job, method, show=sides[1].show, show_plain=sides[0].show)
        if comparison is None:
            raise KeyboardInterrupt
        for side in sides:
            side.text.append(terminal.harmless(side.detokenizer.rest()))
        live.update(picture(), refresh=True)
    if not console.is_terminal:
        console.print(picture())
    theirs = by_transformers(job, run.tokens)
    said = _described(comparison, theirs)
    console.print(said)
    if camera is not None:
        camera.rule(title)
        camera.print(picture(), said, sep="\n")
    return comparison, theirs


def _described(comparison: RunComparison, theirs: dict[str, Any]) -> str:
    """A scene's figures in one sentence. theirs: transformers'."""
    plain, own, drafts, name = comparison.plain, comparison.other, "nothing drafted", comparison.method.name
    if own["acceptance_rate"] is not None:
        drafts = f"M {own['mean_acceptance_length']:.2f} tokens a step, alpha {own['acceptance_rate']:.2f}"
    speeds = [side["tokens_per_second"] for side in (theirs, plain, own)]
    said = (
        f"tokens/s: transformers {speeds[0]:.0f}, plain {speeds[1]:.0f}, {name} {speeds[2]:.0f}; {name} is "
        f"{speeds[2] / speeds[0]:.1f} x transformers, {comparison.speed_up:.2f} x plain; {drafts}; {comparison.verdict()}"
        f"{'' if theirs['identical'] else ' (transformers wrote another text)'}"
    )
    warning = busy_warning(comparison.waited_share, theirs["waited_share"])
    return said if warning is None else f"{said}; {warning}"
