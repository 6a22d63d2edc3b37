"""A data set as a task: where its records are, how they become prompts, and how outputs are scored."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from skipstone.utils.records import HubRecords, json_lines

Record = dict[str, Any]  # one record of a data set, in the data set's own schema
INDENT = " " * 4  # replaces one tab in a program


@dataclass(frozen=True)
class ScoreRule:
    """How an output is scored."""

    grade: Callable[[Record, str], dict[str, float]]  # (record, output) -> figures, each between 0 and 1
    executes: bool = False  # whether it runs the model's code
    ready: Callable[[], object] = lambda: None  # raises ImportError where a package is missing


@dataclass(frozen=True)
class DatasetLocation:
    """Where records come from."""

    hub: HubRecords | None  # None if the hub does not have them
    file: str  # JSON lines, relative to the data folder, or an absolute path


@dataclass(frozen=True)
class Task:
    """One data set."""

    name: str
    source: DatasetLocation
    fields: tuple[str, ...]  # keys that every record must have
    licence: str
    ask: Callable[[Record], list[str]]  # record -> the user's turns
    score: ScoreRule | None = None
    answer: Callable[[Record], str | None] | None = None
    """Record -> its answer, for solved examples and for the perplexity of exits; None for a record without one."""
    examples_source: DatasetLocation | None = None  # of solved examples; None if the task has none
    keep: Callable[[Record], bool] | None = None  # filter of the records
    fault: Callable[[Record], str | None] = lambda record: None  # first fault of a record
    category: Callable[[Record], str | None] = lambda record: None  # category of a record, for tables by category
    rouge: str | None = None
    """The reference field for protocols that use ROUGE instead of the score."""
    obtain: str = ""  # how to get the records without the hub

    def records(self, data_dir: Path | None) -> list[Record]:
        """The records in order. FileNotFoundError or OSError say how to get them; ValueError for another schema."""
        found = list(filter(self.keep, self._read(self.source, data_dir, False)))
        if not found:
            place = data_dir / self.source.file if data_dir else self.source.hub
            raise ValueError(f"task {self.name} has no records in {place}")
        return found

    def examples(self, count: int, data_dir: Path | None) -> list[Record]:
        """The first `count` solved examples. ValueError for a task without any."""
        if not count:
            return []
        if self.examples_source is None:
            raise ValueError(f"task {self.name} has no examples to show: give no shots")
        return list(islice(self._read(self.examples_source, data_dir, True), count))

    def _read(self, source: DatasetLocation, data_dir: Path | None, streaming: bool) -> Iterator[Record]:
        if data_dir is not None or Path(source.file).is_absolute():
            path = (data_dir or Path()) / source.file
            if not path.is_file():
                raise FileNotFoundError(f"task {self.name}: {data_dir} holds no {source.file}. {self._how_to_get_it()}")
            placed = json_lines(path)
        elif source.hub is None:
            raise FileNotFoundError(f"task {self.name} is not on the hub. {self._how_to_get_it()}")
        else:
            placed = source.hub.read(f"task {self.name}", "or give a folder of files with --data-dir", streaming)
        return (self._checked(*one) for one in placed)

    def _checked(self, place: str, record: Any) -> Record:
        if missing := [name for name in self.fields if not isinstance(record, dict) or name not in record]:
            raise ValueError(f"{place}: task {self.name} needs {', '.join(self.fields)}; {missing[0]!r} is missing")
        if not isinstance(record, dict):
            raise ValueError(f"{place}: expected an object, found {record!r:.60}")
        if (fault := self.fault(record)) is not None:
            raise ValueError(f"{place}: {fault}")
        return record

    def _how_to_get_it(self) -> str:
        """How to get the records into a data folder."""
        hub = self.source.hub
        if self.obtain or hub is None:
            return self.obtain
        name = f', "{hub.config}"' if hub.config else ""
        return (
            f'With a network: datasets.load_dataset("{hub.path}"{name}, split="{hub.split}").to_json("{self.source.file}"), '
            "then --data-dir with the folder of that file"
        )


def prompt_of(task: Task, record: Record, shown: Sequence[Record]) -> list[str]:
    """The turns of a record, with solved examples before the first turn."""
    turns = task.ask(record)
    if task.answer is None or not shown:
        return turns
    before = "".join(f"{task.ask(one)[0]}{task.answer(one)}\n\n" for one in shown)
    return [before + turns[0], *turns[1:]]


def tabbed(text: str) -> str:
    """Indent with tabs, as the code of SWIFT and of Draft & Verify does in prompts."""
    return text.replace(INDENT, "\t")


def untabbed(text: str) -> str:
    """Indent with spaces again."""
    return text.replace("\t", INDENT)
