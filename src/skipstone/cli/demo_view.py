"""The demo's picture: both texts side by side, live on a terminal, and a sentence of figures."""

import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from skipstone.cli import terminal
from skipstone.cli.runs import ACCEPTED, RunComparison, RunInput, busy_warning, compare_with_plain, run_transformers
from skipstone.decoding.draft import Step
from skipstone.decoding.method import Method
from skipstone.hf.detokenizer import Detokenizer, detokenize

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
        f"tokens/s: transformers {rates[0]:.0f}, plain {rates[1]:.0f}, {name} {rates[2]:.0f}; {name} is "
        f"{rates[2] / rates[0]:.1f} x transformers, {comparison.speed_up:.2f} x plain; {drafts}; {comparison.verdict()}"
        f"{'' if theirs['identical'] else ' (transformers wrote another text)'}"
    )
    warning = busy_warning(comparison.waited_share, theirs["waited_share"])
    return sentence if warning is None else f"{sentence}; {warning}"
