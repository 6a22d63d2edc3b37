"""Tables of texts, and figures as such."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NONE = "-"


@dataclass(frozen=True)
class Table:
    """A title, the columns' names, and rows of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """With its title as a heading."""
        lines = [f"### {self.title}", "", _piped(self.columns), _piped(["---"] * len(self.columns))]
        return "\n".join([*lines, *map(_piped, self.rows)]) + "\n"

    def csv(self) -> str:
        """With its title in the first column."""
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(["table", *self.columns])
        writer.writerows([self.title, *row] for row in self.rows)
        return text.getvalue()


def _piped(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def number(value: float | None, digits: int = 2) -> str:
    """A figure, or a dash where there is none."""
    return NONE if value is None else f"{value:.{digits}f}"


def interval(value: Mapping[str, float] | None, short: bool = False) -> str:
    """A ratio with its interval."""
    if value is None:
        return NONE
    exact = value["high"] - value["low"] < 1e-9  # a row beside itself, or a single prompt
    return number(value["value"]) if short or exact else f"{value['value']:.2f} ({value['low']:.2f}-{value['high']:.2f})"


def calibrated(about: dict[str, Any]) -> str:
    """One sentence about what was calibrated."""
    found = about["realised_agreement"]
    part = about.get("part") or f"layers[:{about['exit_layer']}]"  # so in older files
    said = (
        f"{about['shape']}: {part} agree with all at {found['value']:.3f} "
        f"({found['low']:.3f}-{found['high']:.3f}) on fresh contexts; {about['agreement']} was wanted"
    )
    if alone := about.get("agreement_of_the_whole_token_by_token"):
        said += f"; the whole agrees with itself at {alone['value']:.3f} when it is run token by token"
    if about.get("sure"):
        said += f"; {100 * about['sure']:.0f} % of the vocabulary have a sure successor"
    return said
