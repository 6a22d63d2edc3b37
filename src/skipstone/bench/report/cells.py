"""Tables of texts, and how a figure is written in one."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NONE = "-"  # stands where there is no figure


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


def percent(share: float | None, digits: int = 0) -> str:
    """A share in percent, or a dash where there is none."""
    return NONE if share is None else f"{100 * share:.{digits}f} %"


def scores(figures: Mapping[str, Any]) -> str:
    """A method's scores by name."""
    return ", ".join(f"{name} {value:.3f}" for name, value in (figures.get("scores") or {}).items()) or NONE
