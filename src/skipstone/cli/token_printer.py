"""Text on stdout while it is decoded, with accepted drafts marked."""

import os
import sys

from rich.color import ColorSystem
from rich.style import Style

from skipstone.cli import terminal
from skipstone.cli.runs import RunInput
from skipstone.decoding.draft import Step
from skipstone.hf.detokenizer import Detokenizer

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
