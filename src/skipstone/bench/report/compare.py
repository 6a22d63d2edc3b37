"""`skipstone bench compare`: two runs of the same prompts, method by method, with a verdict that CI can use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skipstone.bench.journal import Line
from skipstone.bench.lineup import BASELINE, THEIRS
from skipstone.bench.peers import PEERS
from skipstone.bench.report.cells import Table
from skipstone.bench.report.figures import Group
from skipstone.bench.report.report import load
from skipstone.timing.statistics import LOOPING, Estimate, Rate, bootstrap_rate, rate


@dataclass(frozen=True)
class Change:
    """One method on one task in two runs.

    speed: tokens a second of the second run over those of the first. relative: the same, each over its own run's yardstick
    (transformers' `generate`, else our plain decoding), which takes the machine's mood out of it; None where a run has none.
    by_theirs: that yardstick is transformers'. same: prompts, of `prompts`, whose texts are the same. faithful: greedy texts of
    a lossless method that are the yardstick's, in either run. scores: name -> mean change with its interval.
    """

    title: str
    label: str
    method: str
    prompts: int
    speed: Estimate
    relative: Estimate | None
    by_theirs: bool
    same: int
    faithful: tuple[int, int] | None
    scores: dict[str, Estimate]

    def slower(self, tolerance: float) -> bool:
        """Whether it certainly lost more than the tolerance. What is not ours to change is never slower; over our own plain
        decoding, which may have become faster, only what lost speed itself is."""
        if self.method in PEERS:
            return False
        lost = (self.relative or self.speed).high < 1 - tolerance
        return lost and (self.by_theirs or self.relative is None or self.speed.value < 1)

    def worse(self, tolerance: float) -> list[str]:
        """Everything that CI should stop at."""
        found = ["SLOWER"] if self.slower(tolerance) else []
        if self.faithful is not None and self.faithful[1] < self.faithful[0]:
            whose = "those of transformers' generate" if self.by_theirs else "plain decoding's"
            found.append(f"OTHER TEXTS: {self.faithful[1]} instead of {self.faithful[0]} are {whose}")
        lower = [name for name, change in self.scores.items() if change.high < 0 and self.method not in PEERS]
        return found + [f"LOWER {name}" for name in lower]


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
    calm = [pair for pair in pairs if all(row["repeated_share"] < LOOPING for rows in pair for row in rows.values())]
    found = []
    for label in (label for label in a.labels if label in b.labels):
        both = [(x, y) for x, y in calm or pairs if label in x and label in y]
        if both:
            found.append(_change(a, label, both))
    return found


def _change(group: Group, label: str, both: Sequence[tuple[Line, Line]]) -> Change:
    """both: the rows of either run, prompt by prompt."""
    about = group.about["methods"][label]
    mine = [(x[label], y[label]) for x, y in both]
    rulers = (group.called(THEIRS), None if about["method"] == BASELINE else group.called(BASELINE))
    yardstick = next((one for one in rulers if one and all(one in x and one in y for x, y in both)), None)
    faster = _faster(mine)
    relative, faithful = None, None
    if yardstick and about["method"] not in PEERS:
        ruled = [(x[yardstick], y[yardstick]) for x, y in both]
        relative = (faster / _faster(ruled)).estimate()
        if about["lossless"] and not group.temperature:
            equal = [
                [m["digests"] == r["digests"] for m, r in zip(one, two, strict=True)]
                for one, two in zip(mine, ruled, strict=True)
            ]
            faithful = (sum(one for one, _ in equal), sum(two for _, two in equal))
    same = sum(x["digests"] == y["digests"] for x, y in mine)
    by_theirs = yardstick is not None and yardstick == group.called(THEIRS)
    speed = faster.estimate()
    scores = _score_changes(mine)
    return Change(
        group.title, group.shown_as(label), about["method"], len(mine), speed, relative, by_theirs, same, faithful, scores
    )


def _score_changes(mine: Sequence[tuple[Line, Line]]) -> dict[str, Estimate]:
    """Name -> mean change of a score over the prompts that have it in both runs, with its paired interval."""
    changes: dict[str, list[float]] = {}
    for old, new in mine:
        for name in {name for one in old["scores"] for name in one} & {name for one in new["scores"] for name in one}:
            before, after = ([one[name] for one in row["scores"] if name in one] for row in (old, new))
            changes.setdefault(name, []).append(sum(after) / len(after) - sum(before) / len(before))
    return {name: bootstrap_rate(values, [1.0] * len(values)) for name, values in changes.items()}


def _faster(both: Sequence[tuple[Line, Line]]) -> Rate:
    """The second run's tokens a second over the first's."""
    first, second = (
        rate([float(row["tokens"]) for row in rows], [float(row["seconds"]) for row in rows])
        for rows in zip(*both, strict=True)
    )
    return second / first


def table(changes: Sequence[Change], tolerance: float) -> Table:
    """Every change in a row, what is worse marked."""
    rows = [
        [
            change.title,
            change.label,
            str(change.prompts),
            str(change.speed),
            str(change.relative or "-"),
            f"{change.same}/{change.prompts}",
            ", ".join(f"{name} {one.value:+.3f}" for name, one in change.scores.items()) or "-",
            "; ".join(change.worse(tolerance)),
        ]
        for change in changes
    ]
    columns = ["run", "method", "prompts", "x tokens/s", "x yardstick", "same texts", "score", ""]
    return Table("second run against the first", columns, rows)
