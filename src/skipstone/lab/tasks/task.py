"""A data set as something to answer: where its records lie, how one asks, how an answer is scored."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from skipstone.utils.records import HubRecords, json_lines

Record = dict[str, Any]  # one record of a data set, in the data set's own schema
INDENT = " " * 4  # what one tab stands for in a program


@dataclass(frozen=True)
class ScoreRule:
    """How an output is scored."""

    grade: Callable[[Record, str], dict[str, float]]  # (record, output) -> figures, each between 0 and 1
    executes: bool = False  # whether it runs the model's code
    ready: Callable[[], object] = lambda: None  # raises ImportError where a package is missing


@dataclass(frozen=True)
class DatasetLocation:
    """Where records lie."""

    hub: HubRecords | None  # None where the hub has none
    file: str  # of JSON lines, in a data folder; an absolute path stands for itself


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
    """Record -> what stands after the prompt in an example that is shown, and whose perplexity is measured; None for a record
    without an answer."""
    examples_source: DatasetLocation | None = None  # where solved examples come from; None shows none
    keep: Callable[[Record], bool] | None = None  # which records are asked
    fault: Callable[[Record], str | None] = lambda record: None  # what is wrong with a record
    category: Callable[[Record], str | None] = lambda record: None  # the kind of its question, for tables of their own
    rouge: str | None = None
    """The field against which an output's ROUGE is measured where a protocol wants that instead of the score."""
    obtain: str = ""  # how to get it without the hub

    def records(self, data_dir: Path | None, limit: int | None = None) -> list[Record]:
        """Its records in their order. FileNotFoundError or OSError that says how to get them, ValueError for another schema."""
        taken = filter(self.keep, self._read(self.source, data_dir, limit is not None))
        found = list(islice(taken, limit))
        if not found:
            place = data_dir / self.source.file if data_dir else self.source.hub
            raise ValueError(f"task {self.name} has no records in {place}")
        return found

    def examples(self, count: int, data_dir: Path | None) -> list[Record]:
        """The first `count` records to show before the question. ValueError for a task that shows none."""
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
    """The turns of a record, with solved examples before the first."""
    turns = task.ask(record)
    if task.answer is None or not shown:
        return turns
    before = "".join(f"{task.ask(one)[0]}{task.answer(one)}\n\n" for one in shown)
    return [before + turns[0], *turns[1:]]


def tabbed(text: str) -> str:
    """Indented by tabs, as SWIFT's code and Draft & Verify's give programs to a model."""
    return text.replace(INDENT, "\t")


def untabbed(text: str) -> str:
    """Indented by spaces again."""
    return text.replace("\t", INDENT)
