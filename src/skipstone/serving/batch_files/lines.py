"""The input of a batch: a file of requests in the shape of OpenAI's batch API, one a line."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from skipstone.utils.files import digest

KEYS = ("custom_id", "method", "url", "body")
"""What a line says, all of it and nothing else."""
ID_DIGITS = 24
"""Hexadecimal digits of the ids that are made for a line."""
SEED_DIGITS = 15
"""Hexadecimal digits of a seed that is made for a line: it has to be below 2 ** 63."""
BOM = b"\xef\xbb\xbf"
"""What some editors begin a UTF-8 file with. It is no part of the first line."""


@dataclass(frozen=True)
class Line:
    """One request. custom_id: what its answer is found by. method, url: of HTTP. body: of the request, of whatever type."""

    custom_id: str
    method: Any
    url: Any
    body: Any

    @cached_property
    def digest(self) -> str:
        """A hash of all that the line says: the ids of its answer are made of it, so that every run gives the same ones."""
        return digest([self.custom_id, self.method, self.url, self.body], 64)

    @property
    def id(self) -> str:
        """Of its line in the output."""
        return f"batch_req_{self.digest[:ID_DIGITS]}"

    @property
    def seed(self) -> int:
        """What it is sampled with where its body has no seed."""
        return int(self.digest[:SEED_DIGITS], 16)


def parsed(raw: bytes) -> Line:
    """The request of a line. ValueError, which says what is wrong, for what is none."""
    try:
        value = json.loads(raw.decode())
    except UnicodeDecodeError:
        raise ValueError("it is no UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("it is no JSON object")
    if missing := [key for key in KEYS if key not in value]:
        raise ValueError(f"{missing[0]} is missing; a line has {', '.join(KEYS)}")
    if unknown := [key for key in value if key not in KEYS]:
        raise ValueError(f"there is no {unknown[0][:40]!r}; a line has {', '.join(KEYS)}")
    name = value["custom_id"]
    if not isinstance(name, str) or not name:
        raise ValueError("custom_id must be a text that is not empty")
    if any(0xD800 <= ord(character) < 0xE000 for character in name):
        raise ValueError("custom_id is no valid Unicode")
    return Line(**value)


class Lines:
    """The requests of a file, each read when it is needed. Lines of nothing but spaces are none. digest: SHA-256 of the file.

    ValueError where a line is no request or two have one custom_id, with the number of the first such line; OSError where the
    file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._begins: list[int] = []  # bytes before every request
        self._check()

    def _check(self) -> None:
        first: dict[str, int] = {}  # custom_id -> number of its line, from 1
        faults: list[str] = []
        content, place = hashlib.sha256(), 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                content.update(raw)
                begin, place = place, place + len(raw)
                if number == 1 and raw.startswith(BOM):
                    begin, raw = begin + len(BOM), raw.removeprefix(BOM)
                if not raw.strip():
                    continue
                self._begins.append(begin)
                try:
                    name = parsed(raw).custom_id
                    if first.setdefault(name, number) != number:
                        raise ValueError(f"line {first[name]} has the custom_id {name[:100]!r}, too")
                except ValueError as error:
                    faults.append(f"line {number}: {error}")
        self.digest = content.hexdigest()
        if faults:
            more = f" (and {len(faults) - 1} more lines are wrong)" if len(faults) > 1 else ""
            raise ValueError(f"{self.path}, {faults[0]}{more}")
        if not self._begins:
            raise ValueError(f"{self.path} has no request")

    def __len__(self) -> int:
        return len(self._begins)

    def raw(self, index: int) -> bytes:
        """A request as it stands in the file. index: its number among them, from 0."""
        with self.path.open("rb") as file:
            file.seek(self._begins[index])
            return file.readline()

    def __getitem__(self, index: int) -> Line:
        return parsed(self.raw(index))
