"""A data set as something to answer: where its records lie, how one asks, how an answer is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from skipstone.records import OnHub, json_lines

Row = dict[str, Any]
INDENT = " " * 4


@dataclass(frozen=True)
class Score:
    """How an output is worth something.

    names: of the figures. of: (row, output) -> figures, each between 0 and 1. executes: it runs model code. ready: raises
    ImportError where a package is missing.
    """

    names: tuple[str, ...]
    of: Callable[[Row, str], dict[str, float]]
    executes: bool = False
    ready: Callable[[], object] = lambda: None


@dataclass(frozen=True)
class Task:
    """One data set.

    hub: None where the hub has none. file: its records as JSON lines, in a data folder. fields: keys that every record must
    have. ask: record -> the user's turns. answer: record -> what stands after the prompt in an example that is shown, and
    whose perplexity is measured; None for a record without. shown: where examples come from, and their file; None takes none.
    keep: which records are asked. fault: record -> what is wrong with it. category: record -> the kind of its question, for
    tables of their own; None has none. rouge: the field that an output's ROUGE may be measured against, where a protocol wants
    that instead of the score. obtain: how to get it without the hub.
    """

    name: str
    hub: OnHub | None
    file: str
    fields: tuple[str, ...]
    licence: str
    ask: Callable[[Row], list[str]]
    score: Score | None = None
    answer: Callable[[Row], str | None] | None = None
    shown: tuple[OnHub, str] | None = None
    keep: Callable[[Row], bool] | None = None
    fault: Callable[[Row], str | None] = lambda row: None
    category: Callable[[Row], str | None] = lambda row: None
    rouge: str | None = None
    obtain: str = ""

    def rows(self, data_dir: Path | None, limit: int | None = None) -> list[Row]:
        """Its records in their order. FileNotFoundError or OSError that says how to get them, ValueError for another schema."""
        taken = filter(self.keep, self._read(self.hub, self.file, data_dir, limit is not None))
        rows = list(islice(taken, limit))
        if not rows:
            raise ValueError(f"task {self.name} has no records in {data_dir / self.file if data_dir else self.hub}")
        return rows

    def examples(self, count: int, data_dir: Path | None) -> list[Row]:
        """The first `count` records to show before the question. ValueError for a task that shows none."""
        if count and self.shown is None:
            raise ValueError(f"task {self.name} has no examples to show: give no shots")
        if not count or self.shown is None:
            return []
        hub, file = self.shown
        return list(islice(self._read(hub, file, data_dir, True), count))

    def _read(self, hub: OnHub | None, file: str, data_dir: Path | None, streaming: bool) -> Iterator[Row]:
        if data_dir is not None or Path(file).is_absolute():
            place = (data_dir or Path()) / file  # an absolute path stands for itself
            if not place.is_file():
                raise FileNotFoundError(f"task {self.name}: {data_dir} holds no {file}. {self.how()}")
            records = json_lines(place)
        elif hub is None:
            raise FileNotFoundError(f"task {self.name} is not on the hub. {self.how()}")
        else:
            records = hub.read(f"task {self.name}", "or give a folder of files with --data-dir", streaming)
        return (self._checked(*one) for one in records)

    def _checked(self, place: str, row: Any) -> Row:
        if missing := [name for name in self.fields if not isinstance(row, dict) or name not in row]:
            raise ValueError(f"{place}: task {self.name} needs {', '.join(self.fields)}; {missing[0]!r} is missing")
        if not isinstance(row, dict):
            raise ValueError(f"{place}: expected an object, found {row!r:.60}")
        if (fault := self.fault(row)) is not None:
            raise ValueError(f"{place}: {fault}")
        return row

    def how(self) -> str:
        """How to get the records into a data folder."""
        if self.obtain:
            return self.obtain
        assert self.hub is not None
        name = f', "{self.hub.config}"' if self.hub.config else ""
        return (
            f'With a network: datasets.load_dataset("{self.hub.path}"{name}, split="{self.hub.split}").to_json("{self.file}"), '
            "then --data-dir with the folder of that file"
        )


def prompt_of(task: Task, row: Row, shown: Sequence[Row]) -> list[str]:
    """The turns of a record, with solved examples before the first."""
    turns = task.ask(row)
    if task.answer is None or not shown:
        return turns
    before = "".join(f"{task.ask(one)[0]}{task.answer(one)}\n\n" for one in shown)
    return [before + turns[0], *turns[1:]]


def tabbed(text: str) -> str:
    """Indented by tabs, as SWIFT's code and Draft & Verify's give programs to a model."""
    return text.replace(INDENT, "\t")


def untabbed(text: str) -> str:
    """The way back."""
    return text.replace("\t", INDENT)
