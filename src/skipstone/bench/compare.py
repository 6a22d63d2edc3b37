"""`skipstone bench compare`: two runs of the same prompts, method by method, with a verdict that CI can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skipstone.bench.figures import Group
from skipstone.bench.lineup import BASELINE, THEIRS
from skipstone.bench.peers import PEERS
from skipstone.bench.report import load
from skipstone.bench.statistics import Estimate, bootstrap_speedup
from skipstone.bench.tables import Table

TOLERANCE = 0.05
"""A method is slower when its whole interval lies so far below 1."""


@dataclass(frozen=True)
class Change:
    """One method on one task in two runs.

    speed: tokens a second of the second run over those of the first. relative: the same, each over its own run's plain decoding
    (plain decoding over transformers'), which takes the machine's mood out of it; None where a run has none. same: prompts, of
    `prompts`, whose texts are the same.
    """

    title: str
    method: str
    prompts: int
    speed: Estimate
    relative: Estimate | None
    same: int

    def slower(self, tolerance: float) -> bool:
        """Whether it certainly lost more than the tolerance. What is not ours to change is never slower."""
        return self.method not in PEERS and (self.relative or self.speed).high < 1 - tolerance


def compare(one: Path, other: Path) -> list[Change]:
    """What both runs measured, prompt by prompt. ValueError where they have nothing in common."""
    _, before = load([one])
    _, after = load([other])
    changes = [
        change
        for a in before
        for b in after
        if (a.model, a.task, a.temperature) == (b.model, b.task, b.temperature)
        for change in _changes(a, b)
    ]
    if not changes:
        raise ValueError(f"{one} and {other} have no model, task, method and prompt in common")
    return changes


def _changes(a: Group, b: Group) -> list[Change]:
    old = {line["digest"]: line["rows"] for line in a.lines}
    pairs = [(old[line["digest"]], line["rows"]) for line in b.lines if line["digest"] in old]
    found = []
    for label in (label for label in a.labels if label in b.labels):
        both = [(x, y) for x, y in pairs if label in x and label in y]
        if not both:
            continue
        yardstick = THEIRS if label == BASELINE else BASELINE
        measured = label not in PEERS and all(yardstick in x and yardstick in y for x, y in both)
        speed = _ratio([y[label] for _, y in both], [x[label] for x, _ in both])
        relative = None
        if measured:  # seconds in units of the yardstick's on the same prompt in the same run
            relative = _ratio(
                [{**y[label], "seconds": y[label]["seconds"] / y[yardstick]["seconds"]} for _, y in both],
                [{**x[label], "seconds": x[label]["seconds"] / x[yardstick]["seconds"]} for x, _ in both],
            )
        same = sum(x[label]["digests"] == y[label]["digests"] for x, y in both)
        found.append(Change(a.title, label, len(both), speed, relative, same))
    return found


def _ratio(mine: Sequence[dict[str, float]], base: Sequence[dict[str, float]]) -> Estimate:
    columns = [[float(row[name]) for row in rows] for rows in (mine, base) for name in ("tokens", "seconds")]
    return bootstrap_speedup(columns[0], columns[1], columns[2], columns[3])


def table(changes: Sequence[Change], tolerance: float) -> Table:
    """Every change in a row, what is slower marked."""
    rows = [
        [
            change.title,
            change.method,
            str(change.prompts),
            str(change.speed),
            str(change.relative or "-"),
            f"{change.same}/{change.prompts}",
            "SLOWER" if change.slower(tolerance) else "",
        ]
        for change in changes
    ]
    columns = ["run", "method", "prompts", "x tokens/s", "x yardstick", "same texts", ""]
    return Table("second run against the first", columns, rows)
