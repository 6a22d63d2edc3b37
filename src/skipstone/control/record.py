"""Decisions in a file: what was decided, on what grounds, and what came of it, so that all can be decided again, without a
model.

A line of JSON each: the state at first, then events, of which a decision is a fold: a request begins, a shadow was graded, a
step was taken.
"""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from skipstone.control import control, learning
from skipstone.control.state import Done, Plan, State

MOST_BEHIND = 16
"""States that are kept while a file is read: a decision may be older than what was learnt before its step."""
States = dict[tuple[int, ...], list[State]]
"""Fold -> its latest states, the newest last."""

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
    """Writes events to a file as they happen. number: of the fold, several of which may share a file; each has a state for
    every number of rows that decode (live)."""

    _open: ClassVar[dict[Path, tuple[IO[str], int]]] = {}  # file -> it, and how many folds it has

    def __init__(self, file: IO[str], number: int) -> None:
        self._file, self.number = file, number

    @classmethod
    def at(cls, path: Path) -> "Log":
        """A log in a file, which is begun anew by the first of a process."""
        path = path.absolute()
        file, count = cls._open[path] if path in cls._open else (path.open("w", encoding="utf-8"), 0)
        cls._open[path] = file, count + 1
        return cls(file, count)

    def _write(self, kind: str, live: int, values: Any) -> None:
        self._file.write(json.dumps({"fold": [self.number, live], kind: values}) + "\n")
        self._file.flush()

    def state(self, live: int, state: State) -> None:
        """Where the fold begins."""
        self._write("state", live, state_to_json(state))

    def begin(self) -> None:
        """A request begins, for all states."""
        self._write("begin", 0, None)

    def shadow(
        self, live: int, name: str, confidences: Sequence[float], right: Sequence[bool], seconds: float, read: int
    ) -> None:
        """A drafter was graded."""
        self._write("shadow", live, [name, list(confidences), list(right), seconds, read])

    def step(self, live: int, matches: Sequence[int], planned: Plan | None, taken: Plan, done: Done, behind: int) -> None:
        """A step was taken. planned: what was decided, None where there was nothing to decide; taken: what became of it.
        behind: steps before it that nothing was learnt from when it was decided."""
        values = {"matches": list(matches), "behind": behind, "taken": _PLAN.dump_python(taken, mode="json")}
        values |= {"planned": None if planned is None else _PLAN.dump_python(planned, mode="json")}
        self._write("step", live, values | {"done": _DONE.dump_python(done, mode="json")})


@dataclass(frozen=True)
class Decided:
    """A decision of a file, made again. position: committed tokens before it. recorded, again: what was decided then and
    now. deciding, learning: seconds that these take now. lost: plain steps that what was done counts as slower than plain
    decoding, below 0 as faster."""

    position: int
    recorded: Plan
    again: Plan
    done: Done
    deciding: float
    learning: float
    lost: float

    @property
    def same(self) -> bool:
        return self.recorded == self.again


def replayed(path: Path) -> Iterator[Decided]:
    """All decisions of a file, made again from its first state. ValueError, with the line, for what is none of ours; OSError
    for a file that cannot be read."""
    states: States = {}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
                fold = tuple(event.pop("fold"))
                ((kind, values),) = event.items()
                if kind == "step" and values["planned"] is not None:
                    taken, done = _PLAN.validate_python(values["taken"]), _DONE.validate_python(values["done"])
                    before, known = states[fold][-1], states[fold][-1 - values["behind"]]
                    began = time.perf_counter()
                    again = control.decide(known, values["matches"])
                    decided = time.perf_counter()
                    after = learning.observe(before, taken, done)
                    learnt = time.perf_counter()
                    states[fold] = [*states[fold], after][-MOST_BEHIND:]
                    planned, took = _PLAN.validate_python(values["planned"]), (decided - began, learnt - decided)
                    lost = after.ledger.request.debt - before.ledger.request.debt
                    yield Decided(before.position, planned, again, done, *took, lost)
                else:
                    _fold(states, fold, kind, values)
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise ValueError(
                    f"{path}, line {number}: this is no record of auto's decisions, or of another version ({error!r:.120})"
                ) from error


def _fold(states: States, fold: tuple[int, int], kind: str, values: Any) -> None:
    """Take over one event."""
    if kind == "state":
        states[fold] = [state_from_json(values)]
    elif kind == "begin":
        states.update({key: [learning.begin(known[-1])] for key, known in states.items() if key[0] == fold[0]})
    elif kind == "shadow":
        states[fold] = [learning.shadow(states[fold][-1], *values)]
    elif kind == "step":
        taken, done = _PLAN.validate_python(values["taken"]), _DONE.validate_python(values["done"])
        states[fold].append(learning.observe(states[fold][-1], taken, done))
    else:
        raise ValueError(f"an event {kind!r} that nobody knows")
