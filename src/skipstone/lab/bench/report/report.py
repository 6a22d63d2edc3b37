"""`skipstone bench report`: result files as Markdown, CSV, JSON, or one self-contained page of HTML.

`skipstone bench compare`: two runs of the same prompts, method by method, with a verdict that CI can use.
"""

import html
import json
import re
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from skipstone.lab.bench import run_file
from skipstone.lab.bench.peers import PEERS
from skipstone.lab.bench.plan import BASELINE, THEIRS
from skipstone.lab.bench.report.aggregate import MeasurementGroup, groups, speed
from skipstone.lab.bench.report.charts import charts
from skipstone.lab.bench.report.tables import EXIT_FIGURES, LEGEND, NONE, Table, csv_of, tables
from skipstone.lab.bench.run_file import Line
from skipstone.lab.tasks import protocols
from skipstone.lab.timing import machine
from skipstone.lab.timing.statistics import IntervalEstimate, PooledRate, rate
from skipstone.utils.files import plain, write_whole
from skipstone.utils.processor_watch import was_busy

WIDTH = 150  # characters per line if the output is no terminal
ONLY_IN_FILES = ("repeats", "TTFT ms", "TPOT ms", "peak MiB", "ceiling")  # columns too many for a terminal
FORMATS = ("md", "csv", "json", "html")
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .wide { overflow-x: auto; }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } figure { display: inline-block; margin: 1rem 1rem 1rem 0; }
svg { background: white; max-width: 100%; } pre { white-space: pre-wrap; } .synthetic { color: #b00; font-weight: bold; }
"""


def load(paths: Sequence[Path]) -> tuple[list[Line], list[MeasurementGroup]]:
    """(all lines, groups) of result files. ValueError for other files, and for a file without a measured prompt."""
    lines: list[Line] = []
    all_groups: list[MeasurementGroup] = []
    for path in paths:
        own = run_file.read(path)
        run_file.check(path, own)
        if not (measured := groups(own)):
            raise ValueError(f"{path} holds no measured prompt yet")
        lines += own
        all_groups += measured
    return lines, all_groups


def report(paths: Sequence[Path], form: str, layout: str = "own") -> str:
    """The report as text. form: one of FORMATS."""
    lines, measured = load(paths)
    if form == "md":
        legend = [LEGEND, ""] if layout == "own" else []
        shown = (table.markdown() for table in tables(measured, layout))
        return "\n".join([*_ceilings(lines), "", *shown, *legend, *_notes(lines)]) + "\n"
    if form == "csv":
        return csv_of(measured) if layout == "own" else "\n".join(table.csv() for table in tables(measured, layout))
    if form == "json":
        runs = [line for line in lines if line["kind"] in ("run", "resumed", "model", "first", "tuned")]
        return json.dumps(plain({"runs": runs, "groups": [_group_values(group) for group in measured]}), indent=1) + "\n"
    if form == "html":
        return _page(lines, measured, tables(measured, layout))
    raise ValueError(f"unknown format {form!r}; there are {', '.join(FORMATS)}")


def _group_values(group: MeasurementGroup) -> dict[str, Any]:
    return {
        **{name: getattr(group, name) for name in ("title", "model", "task", "temperature")},
        "exits": group.exits and {name: group.exits.get(name) for name in ("prompts", "tokens", *EXIT_FIGURES)},
        "categories": {part.task: _method_values(part) for part in group.by_category()},
        "methods": _method_values(group),
    }


def _method_values(group: MeasurementGroup) -> dict[str, Any]:
    prompts = {"headline": group.headline(), "all_prompts": group.lines}
    return {label: {name: group.figures(label, lines) for name, lines in prompts.items()} for label in group.labels}


def _ceilings(lines: Sequence[Line]) -> list[str]:
    """The speed that each machine allows, one sentence per model."""
    return [machine.describe_ceiling(line["model"], line["ceiling"], line) for line in lines if line["kind"] == "model"]


def _notes(lines: Sequence[Line]) -> list[str]:
    """Sentences below the tables: cut and left-out prompts, chosen settings, refused methods, and the machine."""
    cut, looping, busy = Counter[str](), Counter[str](), Counter[str]()
    for line in (line for line in lines if line["kind"] in ("first", "prompt", "looping")):
        where = f"{line['model']}, {line.get('task', 'first requests')}"
        cut[where] += bool(line.get("cut"))
        looping[where] += line["kind"] == "looping"
        busy[where] += was_busy(line.get("waited_share"))
    notes = [f"{where}: {n} prompts lost their beginning, for the model or --prompt-tokens." for where, n in (+cut).items()]
    notes += [f"{where}: prompts left out, as plain greedy decoding loops on them: {n}." for where, n in (+looping).items()]
    notes += [
        f"{where}: the machine was busy at {n} of the measurements, so their speeds mean little."
        for where, n in (+busy).items()
    ]
    for line in lines:
        if line["kind"] == "model":
            if line["synthetic"] and "realised_agreement" in line["synthetic"]:
                notes.append(f"SYNTHETIC MODEL: {describe_calibration(line['synthetic'])}.")
            for reason in dict.fromkeys(line["refused"].values()):
                labels = [label for label, own in line["refused"].items() if own == reason]
                notes.append(f"{', '.join(labels)}: no row, {reason}.")
        elif line["kind"] == "tuned":
            settings = ", ".join(f"{name}={value}" for name, value in line["chosen"].items())
            notes.append(f"{line['task']}, {line['method']}: {settings} (best of {line['candidates']}, {line['calls']} calls).")
        elif line["kind"] in ("run", "resumed"):
            notes += [*_protocol_notes(line.get("plan", {})), _provenance_note(line)]
    return notes


def _protocol_notes(plan: Line) -> list[str]:
    """What a paper leaves open in its protocol, and our choice."""
    notes = []
    for task in plan.get("tasks", ()):
        protocol = task.get("protocol") or plan.get("protocol")
        if protocol and (ours := protocols.settings(protocol, task["task"]).ours):
            notes.append(f"{task['task']} as {protocol} asks it; not stated there and ours: {ours}.")
    return notes


def _provenance_note(line: Line) -> str:
    run = line["provenance"]
    packages = ", ".join(f"{name} {version}" for name, version in run["packages"].items() if version)
    commit = f", {run['git']['sha'][:12]}{' changed' if run['git']['dirty'] else ''}" if run["git"] else ""
    resumed = "gone on with " if line["kind"] == "resumed" else ""
    return f"{resumed}`{' '.join(run['argv'])}`: {run['cpu']}, {run['threads']} threads, {packages}{commit}."


def describe_calibration(about: dict[str, Any]) -> str:
    """A synthetic model's agreement in one sentence. about: `CalibratedSurrogate.report`."""
    part = about.get("part") or f"layers[:{about['exit_layer']}]"  # older files hold the exit layer only
    found = "{value:.3f} ({low:.3f}-{high:.3f})".format(**about["realised_agreement"])
    text = f"{about['shape']}: {part} agree with all at {found} on fresh contexts; {about['agreement']} was wanted"
    if alone := about.get("agreement_of_the_whole_token_by_token"):
        text += f"; the whole agrees with itself at {alone['value']:.3f} when it is run token by token"
    if about.get("sure"):
        text += f"; {100 * about['sure']:.0f} % of the vocabulary have a sure successor"
    return text


def _page(lines: Sequence[Line], measured: Sequence[MeasurementGroup], shown: Sequence[Table]) -> str:
    """One self-contained page of HTML with all texts escaped."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>skipstone bench</title><style>{STYLE}</style>"]
    parts.append("<h1>skipstone bench</h1>")
    if any(group.about["synthetic"] for group in measured):
        parts.append("<p class=synthetic>SYNTHETIC MODEL: random weights. Nothing here is about a language model.</p>")
    parts += [f"<p>{html.escape(text)}</p>" for text in _ceilings(lines)]
    for table in shown:
        head = "".join(f"<th>{html.escape(column)}" for column in table.columns)
        rows = ("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in table.rows)
        parts.append(f"<h2>{html.escape(table.title)}</h2>")
        parts.append(f"<div class=wide><table><tr>{head}{''.join(rows)}</table></div>")
    parts += [f"<figure>{svg}</figure>" for group in measured for svg in charts(group).values()]
    parts.append(f"<p>{html.escape(LEGEND)}</p>")
    parts += [f"<pre>{html.escape(note)}</pre>" for note in _notes(lines)]
    return "\n".join(parts) + "\n"


def pictures(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Write the page's pictures as SVG files and return their paths.

    Files are named after task and picture, and after the model if there are several.
    """
    _, measured = load(paths)
    several = len({group.model for group in measured}) > 1
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    stems: Counter[str] = Counter()
    for group in measured:
        model = f"{group.subject} " if several or group.about["synthetic"] else ""
        for title, svg in charts(group).items():
            stem = re.sub(r"[^a-z0-9.]+", "-", f"{model}{group.name} {title}".lower()).strip("-")
            stems[stem] += 1
            written.append(folder / (f"{stem}-{stems[stem]}.svg" if stems[stem] > 1 else f"{stem}.svg"))
            write_whole(written[-1], svg + "\n")
    return written


def show(paths: Sequence[Path], console: Console, layout: str = "own") -> None:
    """Print the tables on a terminal."""
    lines, measured = load(paths)
    if not console.is_terminal:
        console.width = WIDTH
    for text in _ceilings(lines):
        console.print(text, highlight=False, markup=False)
    for table in tables(measured, layout):
        drawn = RichTable(title=table.title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
        first, *others = zip(table.columns, *table.rows, strict=True)  # (name, *cells) each
        columns = [first, *(one for one in others if one[0] not in ONLY_IN_FILES and {*one[1:]} - {NONE})]
        for index, (name, *_) in enumerate(columns):
            min_width = 11 if name.startswith("x ") else None  # keeps an interval in one line
            justify = "right" if index else "left"
            drawn.add_column(name, justify=justify, overflow="fold", no_wrap=not index, min_width=min_width)
        for row in zip(*(cells for _, *cells in columns), strict=True):
            drawn.add_row(*row)
        console.print(drawn)
    for text in (*_notes(lines), *([LEGEND] if layout == "own" else [])):
        console.print(text, highlight=False, markup=False)


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
    calm = [pair for pair in pairs if first.calm(pair[:1]) and second.calm(pair[1:])]
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
