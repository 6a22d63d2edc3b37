"""Writes the tables, figures and pictures of the pages from the stored results in docs/lab/results.

    python recipes/results.py [--check]

--check writes nothing and fails if a page and the results differ. NAME is a file of docs/lab/results without its ending, TASK
a task, TASK@1 the task at a temperature of 1, LABEL a method's label, COLUMN a column of `skipstone bench report`, "x", the
speed-up without its interval, or "tried", the number of prompts with those that do not count.

    <!-- results NAME TASK TASK: COLUMN, COLUMN; LABEL => TEXT; LABEL -->      the table below it
    <!-- categories NAME TASK: LABEL; LABEL -->                             speed-ups for each category of the prompts
    <!-- models NAME TASK: COLUMN, COLUMN; LABEL => TEXT -->             mean over the run's models, and the range
    [FIGURES](LINK "COLUMN of NAME TASK TASK: LABEL; LABEL")                a value for each task and label, or the models' mean
    <!-- exits NAME TASK TASK: 3, 6 -->                                 what these exits know of the tasks' answers
    <!-- processes start-NAME -->                                        whole processes, by recipes/measure/start.py
    ![words](FILE.svg "chart of NAME TASK: LABEL; LABEL")                   speed-ups as bars

Without labels, every row of the run is shown. TEXT stands in the table instead of the label.
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from skipstone.lab.bench import records
from skipstone.lab.bench.records import Record
from skipstone.lab.bench.report import tables
from skipstone.lab.bench.report.aggregate import VANILLA
from skipstone.lab.bench.report.charts import speedup_chart
from skipstone.lab.bench.report.tables import Table, cells_of, fill
from skipstone.utils.files import digest, read_lines

ROOT = Path(__file__).parents[1]
RESULTS = Path("docs", "lab", "results")
PAGES = ("README.md", "docs/**/*.md")
HEADS = {"KL": "divergence", "top-1": "agreement", "sure (> .75)": "sure", "right where sure": "right"}
"""Column of exit heads -> what recipes/measure/heads_results.py stores: of the model's own head, and of the trained one."""
COLUMNS = {
    **{column: f"{{before[{name}]:.3f}} -> {{{name}:.3f}}" for column, name in HEADS.items()},
    "rank": "{settings[lm_head][rank]} of {settings[lm_head][size]}, {settings[lm_head][least]:.3g}",
    **tables.DRAFT_MODELS,
    **tables.EXIT_HEADS,
    **tables.LAYER_SETS,
    **tables.COLUMNS,
    "x": "{speedups[autoregressive][value]:.2f}",
    "x Vanilla": f"{{intervals[{VANILLA}]}}",
    "tried": "{tried}",
}
KINDS = "results|models|categories|exits|processes"
TABLE = re.compile(rf"(<!-- (?P<kind>{KINDS}) (?P<rows>[^:\n]*?)(?P<shown>:[^\n]*?)? -->\n)(?:\|[^\n]*\n)*")
LINK = re.compile(r'(?<!!)\[[^\]]*\](?P<link>\([^\s)]+ "(?P<column>[^"]*?) of (?P<rows>[^:"]*): (?P<labels>[^"]*)"\))')
TAG = re.compile(rf'<!-- *(?:{KINDS})\b|\]\(\S+ "[^"]* of [^"]*"\)')
"""What looks like a tag, also with a mistake."""
CHART = re.compile(r'!\[[^\]]*\]\((?P<file>\S+) "chart of (?P<rows>[^:"]*): (?P<labels>[^"]*)"\)')


class Results:
    """The stored results of a folder of pages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.load = cache(lambda name: records.read(root / RESULTS / f"{name}.jsonl"))

    def cells(self, rows: str) -> list[tuple[str, list[Record]]]:
        """(task, its records) for "NAME TASK TASK". ValueError if a task has none."""
        name, *tasks = rows.split()
        found = []
        for task in tasks:
            plain, _, temperature = task.partition("@")
            wanted = {"task": plain, "temperature": float(temperature or 0)}.items()
            if not (own := [one for one in self.load(name) if wanted <= one.items()]):
                raise ValueError(f"{name} has no record of the task {task}")
            found.append((task, own))
        return found

    def table(self, rows: str, shown: str) -> str:
        """A row for each method; every task has the columns."""
        columns, _, chosen = shown.partition(";")
        cells, names = self.cells(rows), [column.strip() for column in columns.split(",")]
        head = ["method", *(name if len(cells) == 1 else f"{_title(task)}, {name}" for task, _ in cells for name in names)]
        lines = []
        for label, text in _rows(chosen, [one for _, own in cells for one in own]).items():
            found = [next((one for one in own if one["label"] == label), None) for _, own in cells]
            if not any(found):
                raise ValueError(f"{rows} has no row {label!r}")
            lossy = "" if all(one["lossless"] for one in found if one) else " (lossy)"
            figures = [_cell(one, name) if one else tables.NONE for one in found for name in names]
            lines.append([(text or label) + lossy, *figures])
        return Table("", head, lines).markdown().partition("\n\n")[2]

    def models(self, rows: str, shown: str) -> str:
        """A row for each method with means over all models of a run, such as trainings with other seeds."""
        columns, _, chosen = shown.partition(";")
        ((_, own),) = self.cells(rows)
        names, models = [column.strip() for column in columns.split(",")], {one["model"] for one in own}
        lines = []
        for label, text in _rows(chosen, own).items():
            lossy = "" if _named(own, label)["lossless"] else " (lossy)"
            lines.append([(text or label) + lossy, *(_value(own, label, name) for name in names)])
        return Table("", [f"method, mean of {len(models)} models", *names], lines).markdown().partition("\n\n")[2]

    def categories(self, rows: str, shown: str) -> str:
        """A row for each category of a task's prompts, with the speed-up of every method."""
        ((task, own),) = self.cells(rows)
        labels = [*_texts(shown)]
        chosen = [_named(own, label) for label in labels]
        if not (kinds := chosen[0]["categories"]):
            raise ValueError(f"the prompts of {task} have no categories")
        lines = []
        for kind in sorted({*kinds}, key=str):
            ratios = (records.speedup(one, records.baseline(one, own), kind) for one in chosen)
            lines.append([str(kind), str(kinds.count(kind)), *(tables.interval(**vars(ratio)) for ratio in ratios)])
        return Table("", ["category", "n", *labels], lines).markdown().partition("\n\n")[2]

    def exits(self, rows: str, shown: str) -> str:
        """A row for each task, model and figure, with its value at some exits."""
        layers, lines = [int(layer) for layer in shown.split(",")], []
        found = [(task, one) for task, own in self.cells(rows) for one in own if one["exits"]]
        several = len({one["model"] for _, one in found}) > 1
        for task, one in found:
            about = [task, one["model"]] if several else [task]
            for name, title in tables.EXIT_FIGURES.items():
                if values := one["exits"].get(name):
                    lines.append([*about, title, *(f"{values[layer - 1]:.3g}" for layer in layers)])
        head = ["task", *(["model"] if several else []), "figure", *(f"E = {layer}" for layer in layers)]
        return Table("", head, lines).markdown().partition("\n\n")[2]

    def processes(self, name: str, shown: str) -> str:
        """Medians of whole processes."""
        from recipes.measure import start

        return start.table(read_lines(self.root / RESULTS / f"{name.strip()}.jsonl"))

    def figures(self, column: str, rows: str, labels: str) -> str:
        """The values of a column: those of a label's tasks, then those of the next label."""
        cells = self.cells(rows)
        values = [[_value(own, label.strip(), column) for _, own in cells] for label in labels.split(";")]
        return "; ".join(", ".join(one) for one in values)

    def chart(self, rows: str, labels: str) -> str:
        """A picture with a hash of its speed-ups, since another matplotlib draws other bytes."""
        ((task, own),) = self.cells(rows)
        shown = {label: _named(own, label)["figures"] for label in _texts(labels)}
        drawn = speedup_chart(shown, f"{own[0]['model']}, {_title(task)}")
        return drawn + f"<!-- {self.chart_digest(rows, labels)} -->\n"

    def chart_digest(self, rows: str, labels: str) -> str:
        """A hash of a picture's speed-ups."""
        ((_, own),) = self.cells(rows)
        return digest({label: _named(own, label)["figures"]["speedups"] for label in _texts(labels)})

    def render(self, page: str) -> str:
        """A page with its tables and figures. ValueError for a name that no record has."""

        def table(found: re.Match[str]) -> str:
            draw: Callable[[str, str], str] = getattr(self, {"results": "table"}.get(found["kind"], found["kind"]))
            return found[1] + draw(found["rows"], (found["shown"] or "").lstrip(":")).rstrip("\n") + "\n"

        def link(found: re.Match[str]) -> str:
            return f"[{self.figures(found['column'], found['rows'], found['labels'])}]{found['link']}"

        if (tags := len(TAG.findall(page))) != (
            read := len(TABLE.findall(page)) + len(LINK.findall(page)) + len(CHART.findall(page))
        ):
            raise ValueError(f"{tags - read} of {tags} tags cannot be read: see recipes/results.py")
        return LINK.sub(link, TABLE.sub(table, page))


def _title(task: str) -> str:
    name, _, temperature = task.partition("@")
    return f"{name}, T = {temperature}" if temperature else name


def _rows(chosen: str, own: list[Record]) -> dict[str, str]:
    """LABEL -> TEXT of the chosen rows, by default of all."""
    return _texts(chosen) or dict.fromkeys((one["label"] for one in own), "")


def _texts(chosen: str) -> dict[str, str]:
    """LABEL -> TEXT of "LABEL => TEXT; LABEL"; the text is empty where none is given."""
    parts = (one.partition(" => ") for one in chosen.split(";") if one.strip())
    return {label.strip(): text.strip() for label, _, text in parts}


def _mean(cells: list[str]) -> str:
    """The mean of cells and their range, by the first number of each that is no part of a name. It has as many digits."""
    if not cells or tables.NONE in cells:
        return tables.NONE
    numbers = [found[0] for cell in cells if (found := re.search(r"(?<![\w@.])-?\d+\.?\d*", cell))]
    digits, values = len(numbers[0].partition(".")[2]), [*map(float, numbers)]
    return f"{fmean(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def _named(own: list[Record], label: str) -> Record:
    if (found := next((one for one in own if one["label"] == label), None)) is None:
        raise ValueError(
            f"{own[0]['model']}, {own[0]['task']} has no row {label!r}; it has {', '.join(one['label'] for one in own)}"
        )
    return found


def _value(own: list[Record], label: str, column: str) -> str:
    """A row's cell. Over several models, the mean and the range."""
    models = [*dict.fromkeys(one["model"] for one in own)]
    cells = [_cell(_named([one for one in own if one["model"] == model], label), column) for model in models]
    return cells[0] if len(cells) == 1 else _mean(cells)


def _cell(record: Record, column: str) -> str:
    if column not in COLUMNS:
        raise ValueError(f"there is no column {column!r}; there are {', '.join(COLUMNS)}")
    tried = len(record["places"]) + record["left_out"]
    figures: Any = tables.NO_FIGURES | record["figures"] | {"tried": tried}
    return fill(COLUMNS[column], cells_of(record["label"], record["settings"], figures))


def changes(root: Path) -> Iterator[tuple[Path, str]]:
    """(file, its content) of every page and picture that differs from the results. ValueError names the page of a fault."""
    results = Results(root)
    for path in (path for pattern in PAGES for path in sorted(root.glob(pattern))):
        old = path.read_text(encoding="utf-8")
        try:
            new = results.render(old)
            for found in CHART.finditer(old):
                picture = path.parent / found["file"]
                shown = picture.read_text(encoding="utf-8") if picture.exists() else ""
                if results.chart_digest(found["rows"], found["labels"]) not in shown:
                    yield picture, results.chart(found["rows"], found["labels"])
        except (ValueError, OSError) as error:
            raise ValueError(f"{path}: {error}") from error
        if new != old:
            yield path, new


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    try:
        found = [*changes(ROOT)]
    except ValueError as error:
        sys.exit(str(error))
    for path, content in found:
        print(path.relative_to(ROOT))
        if not args.check:
            path.write_text(content, encoding="utf-8")
    if args.check and found:
        sys.exit("these pages differ from docs/lab/results: run `python recipes/results.py`")
