"""Writes the policy's states, events and decisions to a file. `skipstone.lab.inspect.policy_replay` makes all decisions again.

A line of JSON each: a policy, then the events that change it. `Policy` depends on nothing else.
"""

import json
from pathlib import Path
from typing import IO, Any, ClassVar

from pydantic_core import to_jsonable_python


class PolicyLog:
    """Writes events to a file as they happen. number: of the writer, as several may share a file."""

    _open: ClassVar[dict[Path, tuple[IO[str], int]]] = {}  # path -> open file, number of its writers

    def __init__(self, path: Path) -> None:
        """The first log of a process at a path overwrites the file."""
        path = path.absolute()
        self._file, self.number = self._open[path] if path in self._open else (path.open("w", encoding="utf-8"), 0)
        self._open[path] = self._file, self.number + 1

    def write(self, event: str, live: int, values: Any = None) -> None:
        """event: "state" of a policy, "request", "replay" (values: as in `Policy.observe_replay`), or "steps" (arguments and
        result of `Policy.decide`, arguments of `Policy.observe`). live: number of rows, each of which has a policy."""
        self._file.write(json.dumps({"writer": [self.number, live], event: to_jsonable_python(values)}) + "\n")
        self._file.flush()
