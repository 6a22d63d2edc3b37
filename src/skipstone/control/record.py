"""Decisions in a file: what was decided, on what grounds, and what came of it, so that all can be decided again, without a
model.

A line of JSON each: the state at first, then events, of which a decision is a fold: a request begins, a shadow was graded, a
step was taken.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter, ValidationError

from skipstone.control import control
from skipstone.control.control import Done, Plan, State

_STATE, _PLAN, _DONE = TypeAdapter(State), TypeAdapter(Plan), TypeAdapter(Done)


def state_to_json(state: State) -> dict[str, Any]:
    """Plain JSON values that `state_from_json` reads."""
    return _STATE.dump_python(state, mode="json")


def state_from_json(values: Any) -> State:
    """ValueError for what is no state."""
    try:
        return _STATE.validate_python(values)
    except ValidationError as error:
        raise ValueError(f"no state of auto: {error.errors()[0]['loc']} {error.errors()[0]['msg']}") from error


class Log:
    """Writes events to a file as they happen."""

    def __init__(self, path: Path) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def _write(self, kind: str, values: Any) -> None:
        self._file.write(json.dumps({kind: values}) + "\n")
        self._file.flush()

    def state(self, state: State) -> None:
        """Where the fold begins."""
        self._write("state", state_to_json(state))

    def begin(self) -> None:
        """A request begins."""
        self._write("begin", None)

    def shadow(self, name: str, confidences: Sequence[float], right: Sequence[bool], seconds: float) -> None:
        """A drafter was graded."""
        self._write("shadow", [name, list(confidences), list(right), seconds])

    def step(self, matches: Sequence[int], planned: Plan | None, taken: Plan, done: Done) -> None:
        """A step was taken. planned: what was decided, None where there was nothing to decide; taken: what became of it."""
        values = {"matches": list(matches), "taken": _PLAN.dump_python(taken, mode="json")}
        values |= {"planned": None if planned is None else _PLAN.dump_python(planned, mode="json")}
        self._write("step", values | {"done": _DONE.dump_python(done, mode="json")})


@dataclass(frozen=True)
class Decided:
    """A decision of a file, made again. position: committed tokens before it. recorded, again: what was decided then and
    now."""

    position: int
    recorded: Plan
    again: Plan
    done: Done

    @property
    def same(self) -> bool:
        return self.recorded == self.again


def replayed(path: Path) -> Iterator[Decided]:
    """All decisions of a file, made again from its first state. ValueError, with the line, for what is none of ours; OSError
    for a file that cannot be read."""
    state: State | None = None
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                ((kind, values),) = json.loads(line).items()
                if kind == "state":
                    state = state_from_json(values)
                    continue
                assert state is not None
                if kind == "begin":
                    state = control.begin(state)
                elif kind == "shadow":
                    state = control.shadow(state, *values)
                elif kind == "step":
                    taken, done = _PLAN.validate_python(values["taken"]), _DONE.validate_python(values["done"])
                    if values["planned"] is not None:
                        recorded = _PLAN.validate_python(values["planned"])
                        yield Decided(state.position, recorded, control.decide(state, values["matches"]), done)
                    state = control.observe(state, taken, done)
                else:
                    raise ValueError(f"an event {kind!r} that nobody knows")
            except (ValueError, TypeError, KeyError, AssertionError, AttributeError) as error:
                why = str(error).splitlines()[0] if str(error) else "there is no state before it"
                raise ValueError(f"{path}, line {number}: this is no record of auto's decisions ({why})") from error
