"""Records with their places, for error messages: JSON lines on the disk, and data sets of the Hugging Face hub."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipstone.utils.extras import installed

Placed = Iterator[tuple[str, Any]]  # (place, record); the place is for messages


@dataclass(frozen=True)
class HubRecords:
    """A split of a data set of the hub. extra: the extra of this package that brings `datasets`."""

    path: str
    split: str
    config: str | None = None
    revision: str | None = None
    extra: str = "train"

    def read(self, who: str, otherwise: str, streaming: bool = False) -> Placed:
        """The records in order. streaming: do not download the whole data set first.

        who, otherwise: for messages: the caller, and an alternative. ImportError without the package `datasets`; OSError if the
        hub does not have the data set or cannot be reached.
        """
        need = f"{who}: the data set {self.path} of the hub is read with the package datasets, which is not installed"
        datasets = installed("datasets", need, self.extra)
        try:
            place = {"name": self.config, "split": self.split, "revision": self.revision}
            records = datasets.load_dataset(self.path, **place, streaming=streaming)
        except OSError as error:  # unknown names, no network
            raise OSError(f"{who}: the data set {self.path} could not be had from the hub ({error}): {otherwise}") from error
        return ((f"{self.path}, {self.split}, record {number}", record) for number, record in enumerate(records))


def json_lines(path: Path) -> Placed:
    """The record of every line that is not blank. ValueError with the number of a line that is no JSON."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            place = f"{path}, line {number}"
            text = decoded(line, place, "JSON is UTF-8")
            if not text.strip():
                continue
            try:
                record = json.loads(text)
            except json.JSONDecodeError as error:
                raise ValueError(f"{place} is not JSON: {error}; expected one object a line") from error
            yield place, record


def decoded(data: bytes, place: str, advice: str) -> str:
    """Decode UTF-8. ValueError that names the place and ends in advice."""
    try:
        return data.decode("utf-8-sig")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 text (byte {error.start}): {advice}") from error


def value(record: dict[str, Any], key: str, place: str, asked_by: str) -> Any:
    """The value of a key. ValueError with the keys that exist."""
    if key not in record:
        raise ValueError(f"{place}: the {asked_by} asks for the key {key!r}, found {', '.join(map(str, record)) or 'none'}")
    return record[key]
