"""`skipstone bench compare`: two runs of the same prompts, method by method, with a verdict that CI can use."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

from skipstone.lab.bench.peers import PEERS
from skipstone.lab.bench.plan import BASELINE, THEIRS
from skipstone.lab.bench.prompts import is_calm
from skipstone.lab.bench.report.aggregate import MeasurementGroup, speed
from skipstone.lab.bench.report.report import load
from skipstone.lab.bench.report.tables import NONE, Table
from skipstone.lab.bench.run_file import Line
from skipstone.lab.timing.statistics import IntervalEstimate, PooledRate, rate

RowPairs = Sequence[tuple[Line, Line]]  # (row of the first run, row of the second run), prompt by prompt


class MethodChange:
    """One method on one task in two runs. The yardstick is transformers' `generate`, otherwise our plain decoding.

    same: prompts with equal texts in both runs. speed: tokens per second of the second run over those of the first.
    scores: name -> mean change. relative: the change of speed with each run divided by its own yardstick, so that a slower
    machine cancels out. faithful: per run, greedy texts of a lossless method that equal the yardstick's.
    """

    def __init__(self, group: MeasurementGroup, label: str, rows: RowPairs) -> None:
        """group: of the first run. rows: label -> row in either run, prompt by prompt."""
        about, own = group.about["methods"][label], [(a[label], b[label]) for a, b in rows]
        self.title, self.label, self.method = group.title, group.display_name(label), about["method"]
        self.prompts, self.same = len(own), sum(a["digests"] == b["digests"] for a, b in own)
        self.scores, change = _score_changes(own), _speed_ratio(own)
        self.speed = change.estimate()
        self.relative: IntervalEstimate | None = None
        self.faithful: list[int] | None = None
        possible = () if self.method in PEERS else (THEIRS,) if self.method == BASELINE else (THEIRS, BASELINE)
        in_all = (one for one in possible if all(group.label_of(one) in row for pair in rows for row in pair))
        self.yardstick = next(in_all, None)
        if self.yardstick is not None:
            other = str(group.label_of(self.yardstick))
            self.relative = (change / _speed_ratio([(a[other], b[other]) for a, b in rows])).estimate()
            if about["lossless"] and not group.temperature:
                runs = zip(*rows, strict=True)
                self.faithful = [sum(row[label]["digests"] == row[other]["digests"] for row in run) for run in runs]

    def slower(self, tolerance: float) -> bool:
        """Whether the method certainly lost more than the tolerance.

        Peers are never slower: they are not ours to change. If our own plain decoding is the yardstick, it may have become
        faster, so the method must also have lost absolute speed.
        """
        if self.method in PEERS:
            return False
        lost = (self.relative or self.speed).high < 1 - tolerance
        return lost and (self.yardstick != BASELINE or self.speed.value < 1)

    def regressions(self, tolerance: float) -> list[str]:
        """Everything that CI should fail on."""
        found = ["SLOWER"] if self.slower(tolerance) else []
        if self.faithful is not None and self.faithful[1] < self.faithful[0]:
            whose = "those of transformers' generate" if self.yardstick == THEIRS else "plain decoding's"
            found.append(f"OTHER TEXTS: {self.faithful[1]} instead of {self.faithful[0]} are {whose}")
        lower = [name for name, change in self.scores.items() if change.high < 0 and self.method not in PEERS]
        return found + [f"LOWER {name}" for name in lower]


def compare(first: Path, second: Path) -> list[MethodChange]:
    """The changes of every method and task in both runs. ValueError if they have no prompt in common."""
    pairs = product(load([first])[1], load([second])[1])
    changes = [change for a, b in pairs if _settings(a) == _settings(b) for change in _changes(a, b)]
    if not changes:
        raise ValueError(f"{first} and {second} have no model, task, settings of it, method and prompt in common")
    return changes


def _settings(group: MeasurementGroup) -> tuple[object, ...]:
    """All that two comparable groups share."""
    about = group.about
    return group.model, group.task, group.temperature, group.question, about["dtype"], about["device"]


def _changes(first: MeasurementGroup, second: MeasurementGroup) -> list[MethodChange]:
    by_digest: dict[str, list[Line]] = {}
    for line in first.lines:
        by_digest.setdefault(line["digest"], []).append(line)
    pairs = [(by_digest[line["digest"]].pop(0), line) for line in second.lines if by_digest.get(line["digest"])]
    calm = [pair for pair in pairs if all(map(is_calm, pair))]
    rows = [(a["rows"], b["rows"]) for a, b in calm or pairs]
    shared = {label: [pair for pair in rows if all(label in row for row in pair)] for label in first.labels}
    return [MethodChange(first, label, of_label) for label, of_label in shared.items() if of_label]


def _score_changes(own: RowPairs) -> dict[str, IntervalEstimate]:
    """Name -> mean change of a score over the prompts that have it in both runs."""
    changes: dict[str, list[float]] = {}
    for pair in own:
        before, after = ({name for sample in row["scores"] for name in sample} for row in pair)
        for name in before & after:
            old, new = (fmean(sample[name] for sample in row["scores"] if name in sample) for row in pair)
            changes.setdefault(name, []).append(new - old)
    return {name: rate(values, [1.0] * len(values)).estimate() for name, values in changes.items()}


def _speed_ratio(pairs: RowPairs) -> PooledRate:
    """The second run's tokens per second over the first's."""
    first, second = (speed(rows) for rows in zip(*pairs, strict=True))
    return second / first


def table(changes: Sequence[MethodChange], tolerance: float) -> Table:
    """One row per change; the last column lists what is worse."""
    titles = ("run", "method", "prompts", "x tokens/s", "x yardstick", "same texts", "score", "")
    rows = []
    for change in changes:
        speeds = str(change.speed), str(change.relative or NONE)
        scores = ", ".join(f"{name} {mean.value:+.3f}" for name, mean in change.scores.items()) or NONE
        same, worse = f"{change.same}/{change.prompts}", "; ".join(change.regressions(tolerance))
        rows.append((change.title, change.label, str(change.prompts), *speeds, same, scores, worse))
    return Table("second run against the first", titles, rows)
