"""The file of a run: JSON lines that only grow (`files.LineFile`), so that a killed run goes on where it stopped.

The first line says what is run and where (kind "run"). Then come a line a model ("model"; "calibrated" for a synthetic one),
calls made to choose settings ("trial") and what was chosen ("tuned"), how well exits predict a task's answers ("exits"), a line
a prompt ("prompt"), or a prompt that was left out because plain decoding repeats itself ("looping"), and, after an
interruption, what the run went on with ("resumed").
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skipstone.utils.files import LineFile, plain, read_lines

VERSION = 1
MACHINE = ("cpu", "cuda", "threads", "packages")  # what of the provenance a run that goes on must share with its beginning
UNMEASURED = ("run", "resumed", "model")  # kinds of a file with which nothing is lost
CELL = ("model", "number", "task", "temperature", "question")  # of which task on which model a line tells
NEEDED: dict[str, tuple[str, ...]] = {
    "run": ("plan", "provenance"),
    "resumed": ("provenance",),
    "model": ("model", "dtype", "device", "ceiling", "synthetic", "refused", "methods"),
    "calibrated": ("model", "factor"),
    "trial": (*CELL, "method", "candidate", "prompt", "tokens", "seconds"),
    "tuned": (*CELL, "method", "candidate", "chosen", "candidates", "calls", "trials"),
    "exits": (*CELL, "prompts", "tokens", "perplexity", "agreement"),
    "looping": (*CELL, "index", "digest", "repeated_share"),
    "prompt": (*CELL, "index", "digest", "rows"),
}
"""Kind of a line -> what it must say."""
_ROW = ("tokens", "seconds", "first_seconds", "calls", "digests", "repeated_share", "memory", "scores", "stats")
Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """The whole lines of a run's file, the first one first. A line that was being written when the run was killed is left out.

    ValueError for what is no such file, or a damaged one.
    """
    lines = read_lines(path)
    if lines and (not isinstance(lines[0], dict) or lines[0].get("kind") != "run"):
        raise ValueError(f"{path} is no file of results: it must begin with a line of kind run")
    if lines and lines[0].get("version") != VERSION:
        raise ValueError(f"{path} is of version {lines[0].get('version')}, this skipstone reads version {VERSION}")
    return lines


def check(path: Path, lines: Sequence[Line]) -> None:
    """ValueError for the first line that does not say what its kind says."""
    models: dict[str, Line] = {}
    for number, line in enumerate(lines, 1):
        if (fault := _fault(line, models)) is not None:
            raise ValueError(f"{path}, line {number} is damaged: {fault}")
        if line["kind"] == "model":
            models[line["model"]] = line


def _fault(line: Any, models: Mapping[str, Line]) -> str | None:
    """What is wrong with a line, None where nothing is. models: what was said about models before."""
    if not isinstance(line, dict) or line.get("kind") not in NEEDED:
        return f"expected an object with a kind, one of {', '.join(NEEDED)}"
    kind = line["kind"]
    if missing := [key for key in NEEDED[kind] if key not in line]:
        return f"a line of kind {kind} says {missing[0]!r}, this one does not"
    if kind != "prompt":
        return None
    if line["model"] not in models:
        return f"nothing was said about the model {line['model']!r} before"
    for label, row in line["rows"].items():
        if missing := [key for key in _ROW if not isinstance(row, dict) or key not in row]:
            return f"the row {label} has no {missing[0]!r}"
        if label not in models[line["model"]]["methods"]:
            return f"nothing was said about the method {label!r} before"
        if not row["seconds"] > 0:
            return f"the row {label} took {row['seconds']} seconds"
    return None


def _given(plan: Line) -> Line:
    """A plan without the options of tasks that are left open, which a newer skipstone has more of, and with the present names
    of settings."""
    from skipstone.methods import stored_settings  # imports torch, which a file is checked without

    methods = [stored_settings(wish["method"], wish) for wish in plan.get("methods", ())]
    tasks = [{name: x for name, x in task.items() if x is not None} for task in plan.get("tasks", ())]
    return {**plan, "methods": methods, "tasks": tasks}


class RunFile(LineFile):
    """A run's file, open to be written on. lines: those of the run so far. `with` closes it."""

    def __init__(self, path: Path, plan: Line, provenance: Line, fresh: bool = False) -> None:
        """Begin a file, or go on with one of the same plan on the same machine; fresh begins anew in any case.

        ValueError where it holds another run, with what differs, something else altogether, or is being written.
        """
        super().__init__(path)
        try:
            self.lines: list[Line] = [] if fresh else read(path)
            if any(line["kind"] not in UNMEASURED for line in self.lines):
                self._same(plain(plan), plain(provenance))
                self.go_on()
                self.add({"kind": "resumed", "provenance": provenance})
            else:
                self.lines = []
                refusal = f"{path} is no file of results: give another --out, or --fresh to overwrite it"
                head = {"kind": "run", "version": VERSION, "plan": plan, "provenance": provenance}
                self.begin(head, None if fresh else refusal)
        except BaseException:
            self.close()
            raise

    def _same(self, plan: Line, provenance: Line) -> None:
        """ValueError where the file's run differs in what is measured, or in what it is measured on."""
        first = self.lines[0]
        there = {**_given(first["plan"]), **{key: first["provenance"].get(key) for key in MACHINE}}
        here = {**_given(plan), **{key: provenance.get(key) for key in MACHINE}}
        if different := sorted(key for key in there | here if there.get(key) != here.get(key)):
            key = different[0]
            raise ValueError(
                f"{self.path} holds another run: {', '.join(different)} differ ({key}: {there.get(key)!r:.100} there, "
                f"{here.get(key)!r:.100} here); give another --out, or --fresh to begin anew"
            )

    def other_code(self) -> str | None:
        """The commit that the file was begun with, where it is another than that of this run or was changed since."""
        shas = [line["provenance"].get("git") or {} for line in self.lines if line["kind"] in ("run", "resumed")]
        return shas[0].get("sha") if any(one != shas[0] for one in shas) else None

    def add(self, *lines: Line) -> None:
        super().add(*lines)
        self.lines += map(plain, lines)

    def lines_of(self, kind: str) -> Iterator[Line]:
        """All lines of a kind."""
        return (line for line in self.lines if line["kind"] == kind)
