"""Writes the policy's states, events and decisions to a file. `skipstone.lab.inspect.policy_replay` makes all decisions again.

A line of JSON each: a policy, then the events that change it. `Policy` depends on nothing else.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

from pydantic import TypeAdapter

from skipstone.methods.auto.saved_profile import POLICY
from skipstone.policy.choose_drafter import Decision, Policy, StepResult

DECISION, RESULTS = TypeAdapter(Decision), TypeAdapter(list[StepResult])


class PolicyLog:
    """Writes events to a file as they happen. number: of the writer, as several may share a file. Each writer has a policy for
    every number of rows that decode (live)."""

    _open: ClassVar[dict[Path, tuple[IO[str], int]]] = {}  # path -> open file, number of its writers

    def __init__(self, path: Path) -> None:
        """The first log of a process at a path overwrites the file."""
        path = path.absolute()
        self._file, self.number = self._open[path] if path in self._open else (path.open("w", encoding="utf-8"), 0)
        self._open[path] = self._file, self.number + 1

    def _write(self, kind: str, live: int, values: Any) -> None:
        self._file.write(json.dumps({"writer": [self.number, live], kind: values}) + "\n")
        self._file.flush()

    def policy(self, live: int, policy: Policy) -> None:
        """The state of a policy, before its events."""
        self._write("state", live, POLICY.dump_python(policy, mode="json"))

    def begin_request(self) -> None:
        self._write("request", 0, None)

    def replay(self, live: int, *values: Any) -> None:
        """values: as in `Policy.observe_replay`."""
        self._write("replay", live, values)

    def steps(
        self, live: int, arguments: Sequence[Any], decided: Decision | None, taken: Decision, results: list[StepResult]
    ) -> None:
        """arguments, decided: of `Policy.decide`; None if it was not called. taken: the decision that was carried out."""
        decisions = [None if one is None else DECISION.dump_python(one, mode="json") for one in (decided, taken)]
        self._write("steps", live, [list(arguments), *decisions, RESULTS.dump_python(results, mode="json")])
