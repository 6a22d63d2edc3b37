"""`skipstone bench report`: result files as Markdown, CSV, JSON, or one page of HTML that needs nothing else."""

import html
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from skipstone.lab.bench import run_file
from skipstone.lab.bench.report.aggregate import MeasurementGroup, groups
from skipstone.lab.bench.report.charts import charts
from skipstone.lab.bench.report.tables import LEGEND, NONE, Table, csv_of, tables
from skipstone.lab.bench.run_file import Line
from skipstone.lab.tasks import protocols
from skipstone.lab.timing import machine
from skipstone.utils.files import plain, write_whole

WIDTH = 150  # columns of letters, where the output is no terminal
IN_FILES = ("repeats", "TTFT ms", "TPOT ms", "peak MiB", "ceiling")  # columns for which a terminal has no room
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
    """(all lines, groups) of result files. ValueError for what is none, and for a file without a measured prompt."""
    lines: list[Line] = []
    found: list[MeasurementGroup] = []
    for path in paths:
        own = run_file.read(path)
        run_file.check(path, own)
        if not (made := groups(own)):
            raise ValueError(f"{path} holds no measured prompt yet")
        lines += own
        found += made
    return lines, found


def report(paths: Sequence[Path], form: str, layout: str = "own") -> str:
    """The report as text. form: one of FORMATS."""
    lines, found = load(paths)
    if form == "md":
        legend = [LEGEND, ""] if layout == "own" else []
        shown = (table.markdown() for table in tables(found, layout))
        return "\n".join([*_ceilings(lines), "", *shown, *legend, *_notes(lines)]) + "\n"
    if form == "csv":
        return csv_of(found) if layout == "own" else "\n".join(table.csv() for table in tables(found, layout))
    if form == "json":
        runs = [line for line in lines if line["kind"] in ("run", "resumed", "model", "tuned")]
        return json.dumps(plain({"runs": runs, "groups": [_figures(group) for group in found]}), indent=1) + "\n"
    if form == "html":
        return _page(lines, found, tables(found, layout))
    raise ValueError(f"unknown format {form!r}; there are {', '.join(FORMATS)}")


def _figures(group: MeasurementGroup) -> dict[str, Any]:
    return {
        "title": group.title,
        "model": group.model,
        "task": group.task,
        "temperature": group.temperature,
        "exits": group.exits and {name: group.exits[name] for name in ("prompts", "tokens", "perplexity", "agreement")},
        "categories": {part.task: _methods(part) for part in group.by_category()},
        "methods": _methods(group),
    }


def _methods(group: MeasurementGroup) -> dict[str, Any]:
    over = {"headline": group.headline(), "all_prompts": group.lines}
    return {label: {name: group.figures(label, lines) for name, lines in over.items()} for label in group.labels}


def _ceilings(lines: Sequence[Line]) -> list[str]:
    """What the machine allows, first of all."""
    return [machine.told(line["model"], line["ceiling"], line) for line in lines if line["kind"] == "model"]


def _notes(lines: Sequence[Line]) -> list[str]:
    """What a table alone does not say: chosen settings, what is missing or was cut, where it was measured."""
    told = [(f"{line['model']}, {line['task']}", line) for line in lines if line["kind"] in ("prompt", "looping")]
    cut = Counter(where for where, line in told if line.get("cut"))
    looping = Counter(where for where, line in told if line["kind"] == "looping")
    notes = [f"{where}: {n} prompts lost their beginning, for the model or --prompt-tokens." for where, n in cut.items()]
    notes += [f"{where}: prompts left out, as plain greedy decoding loops on them: {n}." for where, n in looping.items()]
    for line in lines:
        if line["kind"] == "model":
            if line["synthetic"] and "realised_agreement" in line["synthetic"]:
                notes.append(f"SYNTHETIC MODEL: {calibrated(line['synthetic'])}.")
            notes += [f"{label}: no row, {reason}." for label, reason in line["refused"].items()]
        if line["kind"] == "tuned":
            settings = ", ".join(f"{name}={value}" for name, value in line["chosen"].items())
            notes.append(f"{line['task']}, {line['method']}: {settings} (best of {line['candidates']}, {line['calls']} calls).")
        if line["kind"] == "run":
            plan = line["plan"]
            for asked in plan.get("tasks", ()):  # what a paper leaves open of its protocol, and what was taken instead
                protocol = asked.get("protocol") or plan.get("protocol")
                if protocol and (ours := protocols.settings(protocol, asked["task"]).ours):
                    notes.append(f"{asked['task']} as {protocol} asks it; not stated there and ours: {ours}.")
        if line["kind"] in ("run", "resumed"):
            made = line["provenance"]
            packages = ", ".join(f"{name} {version}" for name, version in made["packages"].items() if version)
            sha = f", {made['git']['sha'][:12]}{' changed' if made['git']['dirty'] else ''}" if made["git"] else ""
            again = "gone on with " if line["kind"] == "resumed" else ""
            notes.append(f"{again}`{' '.join(made['argv'])}`: {made['cpu']}, {made['threads']} threads, {packages}{sha}.")
    return notes


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


def _page(lines: Sequence[Line], found: Sequence[MeasurementGroup], shown: Sequence[Table]) -> str:
    """One self-contained page of HTML. Every text in it is escaped."""
    parts = [f"<!doctype html><html lang=en><meta charset=utf-8><title>skipstone bench</title><style>{STYLE}</style>"]
    parts.append("<h1>skipstone bench</h1>")
    if any(group.about["synthetic"] for group in found):
        parts.append("<p class=synthetic>SYNTHETIC MODEL: random weights. Nothing here is about a language model.</p>")
    parts += [f"<p>{html.escape(text)}</p>" for text in _ceilings(lines)]
    for table in shown:
        head = "".join(f"<th>{html.escape(column)}" for column in table.columns)
        rows = ("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) for row in table.rows)
        parts.append(f"<h2>{html.escape(table.title)}</h2>")
        parts.append(f"<div class=wide><table><tr>{head}{''.join(rows)}</table></div>")
    parts += [f"<figure>{svg}</figure>" for group in found for svg in charts(group).values()]
    parts.append(f"<p>{html.escape(LEGEND)}</p>")
    parts += [f"<pre>{html.escape(note)}</pre>" for note in _notes(lines)]
    return "\n".join(parts) + "\n"


def pictures(paths: Sequence[Path], folder: Path) -> list[Path]:
    """The page's pictures as files of SVG, named after task and picture, and after the model where there are several. Returns
    their paths."""
    _, found = load(paths)
    several = len({group.model for group in found}) > 1
    folder.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    stems: Counter[str] = Counter()
    for group, (title, svg) in ((one, chart) for one in found for chart in charts(one).items()):
        words = f"{group.subject if several or group.about['synthetic'] else ''} {group.name} {title}"
        stem = re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-")
        stems[stem] += 1
        written.append(folder / (f"{stem}-{stems[stem]}.svg" if stems[stem] > 1 else f"{stem}.svg"))
        write_whole(written[-1], svg + "\n")
    return written


def _narrow(table: Table) -> Table:
    """Without columns that are in files only, or say nothing."""
    cells = enumerate(zip(table.columns, *table.rows, strict=True))
    kept = [column for i, column in cells if column[0] not in IN_FILES and (not i or {*column[1:]} - {NONE})]
    columns, *rows = zip(*kept, strict=True)
    return Table(table.title, columns, rows)


def show(paths: Sequence[Path], console: Console, layout: str = "own") -> None:
    """The tables on a terminal, without the columns that it has no room for."""
    lines, found = load(paths)
    shown = [_narrow(table) for table in tables(found, layout)]
    if not console.is_terminal:
        console.width = WIDTH
    for text in _ceilings(lines):
        console.print(text, highlight=False, markup=False)
    for table in shown:
        drawn = RichTable(title=table.title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")
        for index, column in enumerate(table.columns):
            least = 11 if column.startswith("x ") else None  # an interval stays in one piece
            drawn.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=not index, min_width=least)
        for row in table.rows:
            drawn.add_row(*row)
        console.print(drawn)
    for text in (*_notes(lines), *([LEGEND] if layout == "own" else [])):
        console.print(text, highlight=False, markup=False)
