"""Records with their places: JSON lines on the disk, data sets of the Hugging Face hub, and what can go wrong with them."""

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Placed = Iterator[tuple[str, Any]]  # (place, record): where a record stands, for messages, and what was read there


@dataclass(frozen=True)
class HubRecords:
    """A split of a data set of the hub. extra: the extra of this package that brings `datasets`."""

    path: str
    split: str
    config: str | None = None
    revision: str | None = None
    extra: str = "train"

    def read(self, who: str, otherwise: str, streaming: bool = False) -> Placed:
        """Its records in their order. streaming: without fetching the whole.

        who, otherwise: for messages, who asks and what else can be done. ImportError that says what to install where `datasets`
        is missing, OSError where the hub does not have it or cannot be reached.
        """
        try:
            datasets = importlib.import_module("datasets")
        except ImportError as error:
            raise ImportError(
                f"{who}: the data set {self.path} of the hub is read with the package datasets, which is not installed: "
                f'pip install "skipstone[{self.extra}]"'
            ) from error
        try:
            wanted = {"name": self.config, "split": self.split, "revision": self.revision}
            records = datasets.load_dataset(self.path, **wanted, streaming=streaming)
        except OSError as error:  # unknown names, no network
            raise OSError(
                f"{who}: the data set {self.path} could not be had from the hub ({error}): check the name and the network, "
                f"{otherwise}"
            ) from error
        return ((f"{self.path}, {self.split}, record {number}", record) for number, record in enumerate(records))


def json_lines(path: Path) -> Placed:
    """What stands on every line that is not blank. ValueError with the number of a line that is no JSON."""
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
    """UTF-8. ValueError that names the place and ends in advice."""
    try:
        return data.decode("utf-8-sig")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        raise ValueError(f"{place} is not UTF-8 text (byte {error.start}): {advice}") from error


def value(record: dict[str, Any], key: str, place: str, asked_by: str) -> Any:
    """What stands under a key. ValueError with the keys that are there."""
    if key not in record:
        raise ValueError(f"{place}: the {asked_by} asks for the key {key!r}, found {', '.join(map(str, record)) or 'none'}")
    return record[key]
