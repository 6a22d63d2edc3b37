"""The input of a batch: a file of requests in the shape of OpenAI's batch API, one per line."""

import hashlib
import json
from functools import cached_property
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from skipstone.utils.files import digest

ID_DIGITS = 24
"""Hexadecimal digits of the ids that are made for a line."""
SEED_DIGITS = 15
"""Hexadecimal digits of the seed that is made for a line, which has to be below 2 ** 63."""
BOM = b"\xef\xbb\xbf"
"""The byte order mark with which some editors begin a UTF-8 file."""


class RequestLine(BaseModel):
    """One request. custom_id: identifies its answer. method, url: of HTTP. body: of the request, of any JSON type."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    custom_id: str = Field(min_length=1)
    method: Any
    url: Any
    body: Any

    @cached_property
    def digest(self) -> str:
        """A hash of the whole line. The ids of its answer are made of it, so that every run gives the same ones."""
        return digest([self.custom_id, self.method, self.url, self.body], 64)

    @property
    def id(self) -> str:
        """The id of its line in the output."""
        return f"batch_req_{self.digest[:ID_DIGITS]}"

    @property
    def seed(self) -> int:
        """The seed if its body has none."""
        return int(self.digest[:SEED_DIGITS], 16)

    def output(self, response: dict[str, Any] | None, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Its line in the output."""
        return {"id": self.id, "custom_id": self.custom_id, "response": response, "error": error}


def parse_line(raw: bytes) -> RequestLine:
    """The request of a line. ValueError with the mistake."""
    try:
        return RequestLine.model_validate(json.loads(raw.decode()))
    except ValidationError as error:
        first = error.errors()[0]
        name = "".join(f"{str(part).encode('unicode_escape').decode():.40}: " for part in first["loc"])
        raise ValueError(f"{name}{first['msg']}; a line is an object of {', '.join(RequestLine.model_fields)}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON ({error})") from None


class RequestFile:
    """The requests of a file, each parsed when it is needed. Blank lines are skipped. digest: SHA-256 of the file.

    ValueError, with the number of the first wrong line, if a line is no request or two have one custom_id. OSError if the file
    cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, content = path, path.read_bytes()
        self.digest = hashlib.sha256(content).hexdigest()
        self._lines: list[bytes] = []
        first: dict[str, int] = {}  # custom_id -> number of its line, from 1
        mistakes: list[str] = []
        for number, raw in enumerate(content.removeprefix(BOM).split(b"\n"), 1):
            if not raw.strip():
                continue
            self._lines.append(raw)
            try:
                name = parse_line(raw).custom_id
                if first.setdefault(name, number) != number:
                    raise ValueError(f"line {first[name]} has the custom_id {name[:100]!r}, too")
            except ValueError as error:
                mistakes.append(f"line {number}: {error}")
        if mistakes:
            more = f" (and {len(mistakes) - 1} more lines are wrong)" if len(mistakes) > 1 else ""
            raise ValueError(f"{path}, {mistakes[0]}{more}")
        if not self._lines:
            raise ValueError(f"{path} has no request")

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> RequestLine:
        """index: number of the request, from 0."""
        return parse_line(self._lines[index])
