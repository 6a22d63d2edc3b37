"""`skipstone bench compare`: two runs of the same prompts, method by method, with a verdict that CI can use."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean

from skipstone.lab.bench.peers import PEERS
from skipstone.lab.bench.plan import BASELINE, THEIRS
from skipstone.lab.bench.report.aggregate import MeasurementGroup, speed
from skipstone.lab.bench.report.report import load
from skipstone.lab.bench.report.tables import Table
from skipstone.lab.bench.run_file import Line
from skipstone.lab.timing.statistics import LOOPING, IntervalEstimate, PooledRate, rate


@dataclass(frozen=True)
class MethodChange:
    """One method on one task in two runs. The yardstick is transformers' `generate`, else our plain decoding."""

    title: str
    label: str
    method: str
    prompts: int
    speed: IntervalEstimate  # tokens a second of the second run over those of the first
    relative: IntervalEstimate | None
    """The same, each over its own run's yardstick, which takes the machine's mood out of it; None where a run has none."""
    by_theirs: bool  # the yardstick is transformers'
    same: int  # prompts whose texts are the same
    faithful: tuple[int, int] | None  # greedy texts of a lossless method that are the yardstick's, in either run
    scores: dict[str, IntervalEstimate]  # name -> mean change with its interval

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


def compare(one: Path, other: Path) -> list[MethodChange]:
    """What both runs measured alike, prompt by prompt. ValueError where they have nothing in common."""
    pairs = product(load([one])[1], load([other])[1])
    changes = [change for a, b in pairs if _alike(a) == _alike(b) for change in _changes(a, b)]
    if not changes:
        raise ValueError(f"{one} and {other} have no model, task, settings of it, method and prompt in common")
    return changes


def _alike(group: MeasurementGroup) -> tuple[object, ...]:
    """What two groups must share to be compared."""
    about = group.about
    return group.model, group.task, group.temperature, group.question, about["dtype"], about["device"]


def _changes(a: MeasurementGroup, b: MeasurementGroup) -> list[MethodChange]:
    old: dict[str, list[Line]] = {}
    for line in a.lines:
        old.setdefault(line["digest"], []).append(line["rows"])
    pairs = [(old[line["digest"]].pop(0), line["rows"]) for line in b.lines if old.get(line["digest"])]
    calm = [pair for pair in pairs if all(row["repeated_share"] < LOOPING for rows in pair for row in rows.values())]
    shared = {label: [(x, y) for x, y in calm or pairs if label in x and label in y] for label in a.labels}
    return [_change(a, label, both) for label, both in shared.items() if both]


def _change(group: MeasurementGroup, label: str, both: Sequence[tuple[Line, Line]]) -> MethodChange:
    """both: the rows of either run, prompt by prompt."""
    about = group.about["methods"][label]
    mine = [(x[label], y[label]) for x, y in both]
    rulers = (group.called(THEIRS), None if about["method"] == BASELINE else group.called(BASELINE))
    yardstick = next((one for one in rulers if one and all(one in x and one in y for x, y in both)), None)
    faster = _faster(mine)
    relative, faithful = None, None
    if yardstick and about["method"] not in PEERS:
        relative = (faster / _faster([(x[yardstick], y[yardstick]) for x, y in both])).estimate()
        if about["lossless"] and not group.temperature:
            same = ([rows[label]["digests"] == rows[yardstick]["digests"] for rows in pair] for pair in both)
            before, after = map(sum, zip(*same, strict=True))
            faithful = before, after
    return MethodChange(
        group.title,
        group.shown_as(label),
        about["method"],
        len(mine),
        faster.estimate(),
        relative,
        yardstick is not None and yardstick == group.called(THEIRS),
        sum(x["digests"] == y["digests"] for x, y in mine),
        faithful,
        _score_changes(mine),
    )


def _score_changes(mine: Sequence[tuple[Line, Line]]) -> dict[str, IntervalEstimate]:
    """Name -> mean change of a score over the prompts that have it in both runs, with its paired interval."""
    changes: dict[str, list[float]] = {}
    for old, new in mine:
        for name in {name for one in old["scores"] for name in one} & {name for one in new["scores"] for name in one}:
            before, after = ([one[name] for one in row["scores"] if name in one] for row in (old, new))
            changes.setdefault(name, []).append(fmean(after) - fmean(before))
    return {name: rate(values, [1.0] * len(values)).estimate() for name, values in changes.items()}


def _faster(both: Sequence[tuple[Line, Line]]) -> PooledRate:
    """The second run's tokens a second over the first's."""
    first, second = (speed(rows) for rows in zip(*both, strict=True))
    return second / first


def table(changes: Sequence[MethodChange], tolerance: float) -> Table:
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
