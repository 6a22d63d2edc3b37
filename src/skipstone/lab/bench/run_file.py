"""The file of a run: JSON lines that only grow (`files.LineFile`), so that a killed run can be resumed.

The first line holds the plan and the machine (kind "run"). Other kinds: "model" describes a model, "calibrated" a synthetic
one. "first" is a method's first request on a model. "trial" is a call that measures a candidate, "tuned" the chosen settings,
"exits" the accuracy of every exit, "prompt" a measured prompt, "looping" a prompt that is left out because plain decoding
repeats itself, and "resumed" the machine of a resumed run.
"""

from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skipstone.utils.files import LineFile, plain, read_lines

VERSION = 1
MACHINE = ("cpu", "cuda", "threads", "packages")  # parts of the provenance that a resumed run must share with its beginning
UNMEASURED = ("run", "resumed", "model")  # a file of these kinds alone may be overwritten
CELL = ("model", "number", "task", "temperature", "question")  # identifies a task on a model
KEYS: dict[str, tuple[str, ...]] = {
    "run": ("plan", "provenance"),
    "resumed": ("provenance",),
    "model": ("model", "dtype", "device", "ceiling", "synthetic", "refused", "methods"),
    "calibrated": ("model", "factor"),
    "first": ("model", "method", "tokens", "seconds", "setup"),
    "trial": (*CELL, "method", "candidate", "prompt", "tokens", "seconds"),
    "tuned": (*CELL, "method", "candidate", "chosen", "candidates", "calls", "trials"),
    "exits": (*CELL, "prompts", "tokens", "perplexity", "agreement"),
    "looping": (*CELL, "index", "digest", "repeated_share"),
    "prompt": (*CELL, "index", "digest", "rows"),
}
"""Kind of a line -> keys that it must have."""
ROW_KEYS = ("tokens", "seconds", "first_seconds", "calls", "digests", "repeated_share", "memory", "scores", "stats")
Line = dict[str, Any]


def read(path: Path) -> list[Line]:
    """The lines of a run's file without an unfinished last line. ValueError for another or a damaged file."""
    lines = read_lines(path)
    if lines and (not isinstance(lines[0], dict) or lines[0].get("kind") != "run"):
        raise ValueError(f"{path} is no file of results: it must begin with a line of kind run")
    if lines and lines[0].get("version") != VERSION:
        raise ValueError(f"{path} is of version {lines[0].get('version')}, this skipstone reads version {VERSION}")
    return lines


def check(path: Path, lines: Sequence[Line]) -> None:
    """ValueError for the first line that lacks something."""
    methods: dict[str, Container[str]] = {}
    for number, line in enumerate(lines, 1):
        if (fault := _fault(line, methods)) is not None:
            raise ValueError(f"{path}, line {number} is damaged: {fault}")
        if line["kind"] == "model":
            methods[line["model"]] = line["methods"]


def _fault(line: Any, methods: Mapping[str, Container[str]]) -> str | None:
    """The first fault of a line, or None. methods: model -> labels in its line."""
    if not isinstance(line, dict) or line.get("kind") not in KEYS:
        return f"expected an object with a kind, one of {', '.join(KEYS)}"
    kind = line["kind"]
    if missing := [key for key in KEYS[kind] if key not in line]:
        return f"a line of kind {kind} says {missing[0]!r}, this one does not"
    if kind != "prompt":
        return None
    if line["model"] not in methods:
        return f"nothing was said about the model {line['model']!r} before"
    for label, row in line["rows"].items():
        if missing := [key for key in ROW_KEYS if not isinstance(row, dict) or key not in row]:
            return f"the row {label} has no {missing[0]!r}"
        if label not in methods[line["model"]]:
            return f"nothing was said about the method {label!r} before"
        if not row["seconds"] > 0:
            return f"the row {label} took {row['seconds']} seconds"
    return None


def _comparable(plan: Line, provenance: Line) -> Line:
    """All that two parts of a run must share. Unset options of tasks are left out, since a newer skipstone has more of them."""
    from skipstone.methods import stored_settings  # imports torch, which checking a file does not need

    methods = [stored_settings(spec["method"], spec) for spec in plan.get("methods", ())]
    tasks = [{name: x for name, x in task.items() if x is not None} for task in plan.get("tasks", ())]
    return {**plan, "methods": methods, "tasks": tasks, **{key: provenance.get(key) for key in MACHINE}}


class RunFile(LineFile):
    """A run's file, open for writing. lines: those of the run so far. `with` closes it."""

    def __init__(self, path: Path, plan: Line, provenance: Line, fresh: bool = False) -> None:
        """Begin a file, or resume one of the same plan on the same machine. fresh: overwrite it.

        ValueError if it holds another run (with the differences), is no such file, or is being written.
        """
        super().__init__(path)
        try:
            self.lines: list[Line] = [] if fresh else read(path)
            if any(line["kind"] not in UNMEASURED for line in self.lines):
                self._check_same(plain(plan), plain(provenance))
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

    def _check_same(self, plan: Line, provenance: Line) -> None:
        """ValueError if the file's run has another plan or another machine."""
        first = self.lines[0]
        there, here = _comparable(first["plan"], first["provenance"]), _comparable(plan, provenance)
        if different := sorted(key for key in there | here if there.get(key) != here.get(key)):
            key = different[0]
            values = f"{key}: {there.get(key)!r:.100} there, {here.get(key)!r:.100} here"
            how = "give another --out, or --fresh to begin anew"
            raise ValueError(f"{self.path} holds another run: {', '.join(different)} differ ({values}); {how}")

    def other_commit(self) -> str | None:
        """The commit that the file was begun with, if a later part of the run has another one."""
        commits = [line["provenance"].get("git") or {} for line in self.lines if line["kind"] in ("run", "resumed")]
        return commits[0].get("sha") if any(one != commits[0] for one in commits) else None

    def add(self, *lines: Line) -> None:
        super().add(*lines)
        self.lines += map(plain, lines)

    def lines_of(self, kind: str) -> Iterator[Line]:
        """All lines of a kind."""
        return (line for line in self.lines if line["kind"] == kind)
