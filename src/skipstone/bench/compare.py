"""`skipstone bench compare`: two runs of the same prompts, method by method, with a verdict that CI can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skipstone.bench.figures import Group
from skipstone.bench.journal import Line
from skipstone.bench.lineup import BASELINE, THEIRS
from skipstone.bench.peers import PEERS
from skipstone.bench.report import load
from skipstone.bench.statistics import Estimate, bootstrap_product
from skipstone.bench.tables import Table


@dataclass(frozen=True)
class Change:
    """One method on one task in two runs.

    speed: tokens a second of the second run over those of the first. relative: the same, each over its own run's plain decoding
    (plain decoding over transformers'), which takes the machine's mood out of it; None where a run has none. same: prompts, of
    `prompts`, whose texts are the same.
    """

    title: str
    label: str
    method: str
    prompts: int
    speed: Estimate
    relative: Estimate | None
    same: int

    def slower(self, tolerance: float) -> bool:
        """Whether it certainly lost more than the tolerance. What is not ours to change is never slower."""
        return self.method not in PEERS and (self.relative or self.speed).high < 1 - tolerance


def compare(one: Path, other: Path) -> list[Change]:
    """What both runs measured alike, prompt by prompt. ValueError where they have nothing in common."""
    _, before = load([one])
    _, after = load([other])
    changes = [change for a in before for b in after if _alike(a) == _alike(b) for change in _changes(a, b)]
    if not changes:
        raise ValueError(f"{one} and {other} have no model, task, settings of it, method and prompt in common")
    return changes


def _alike(group: Group) -> tuple[object, ...]:
    """What two groups must share to be compared."""
    about = group.about
    return group.model, group.task, group.temperature, group.question, about["dtype"], about["device"]


def _changes(a: Group, b: Group) -> list[Change]:
    old: dict[str, list[Line]] = {}
    for line in a.lines:
        old.setdefault(line["digest"], []).append(line["rows"])
    pairs = [(old[line["digest"]].pop(0), line["rows"]) for line in b.lines if old.get(line["digest"])]
    found = []
    for label in (label for label in a.labels if label in b.labels):
        both = [(x[label], y[label]) for x, y in pairs if label in x and label in y]
        if not both:
            continue
        method = a.about["methods"][label]["method"]
        yardstick = a.called(THEIRS if method == BASELINE else BASELINE)
        rulers = [(x[yardstick], y[yardstick]) for x, y in pairs if yardstick in x and yardstick in y]
        mine, base = [_rate([y for _, y in both])], [_rate([x for x, _ in both])]
        relative = None
        if method not in PEERS and len(rulers) == len(both):
            relative = bootstrap_product([*mine, _rate([x for x, _ in rulers])], [*base, _rate([y for _, y in rulers])])
        same = sum(x["digests"] == y["digests"] for x, y in both)
        found.append(Change(a.title, label, method, len(both), bootstrap_product(mine, base), relative, same))
    return found


def _rate(rows: Sequence[Line]) -> tuple[list[float], list[float]]:
    return [float(row["tokens"]) for row in rows], [float(row["seconds"]) for row in rows]


def table(changes: Sequence[Change], tolerance: float) -> Table:
    """Every change in a row, what is slower marked."""
    rows = [
        [
            change.title,
            change.label,
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
