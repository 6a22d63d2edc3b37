"""What the policy was told and what it decided, in a file, so that all decisions can be made again without a model.

A line of JSON each: a policy, then the events that change it. `Policy` depends on nothing else.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, ClassVar

from pydantic import TypeAdapter, ValidationError

from skipstone.policy.choose_drafter import Decision, Policy, StepResult

_POLICY, _DECISION, _RESULTS = TypeAdapter(Policy), TypeAdapter(Decision), TypeAdapter(list[StepResult])


def policy_to_json(policy: Policy) -> dict[str, Any]:
    """Plain JSON values that `policy_from_json` reads."""
    return _POLICY.dump_python(policy, mode="json")


def policy_from_json(values: Any) -> Policy:
    """ValueError for what is no policy."""
    try:
        return _POLICY.validate_python(values)
    except ValidationError as error:
        raise ValueError(f"no policy of auto: {error.errors()[0]['loc']} {error.errors()[0]['msg']}") from error


class PolicyLog:
    """Writes events to a file as they happen. number: of the writer, as several may share a file. Each writer has a policy for
    every number of rows that decode (live)."""

    _open: ClassVar[dict[Path, tuple[IO[str], int]]] = {}  # file -> it, and the number of its writers

    def __init__(self, file: IO[str], number: int) -> None:
        self._file, self.number = file, number

    @classmethod
    def at(cls, path: Path) -> "PolicyLog":
        """A log in a file. The first one of a process begins the file anew."""
        path = path.absolute()
        file, count = cls._open[path] if path in cls._open else (path.open("w", encoding="utf-8"), 0)
        cls._open[path] = file, count + 1
        return cls(file, count)

    def _write(self, kind: str, live: int, values: Any) -> None:
        self._file.write(json.dumps({"writer": [self.number, live], kind: values}) + "\n")
        self._file.flush()

    def policy(self, live: int, policy: Policy) -> None:
        """Where the events of a policy begin."""
        self._write("state", live, policy_to_json(policy))

    def begin_request(self) -> None:
        self._write("request", 0, None)

    def replay(self, live: int, *values: Any) -> None:
        """values: as in `Policy.observe_replay`."""
        self._write("replay", live, values)

    def steps(
        self, live: int, asked: Sequence[Any], decided: Decision | None, taken: Decision, results: list[StepResult]
    ) -> None:
        """asked: what `Policy.decide` was asked with. decided: its answer, None if there was nothing to decide. taken: what was
        done instead."""
        decisions = [None if one is None else _DECISION.dump_python(one, mode="json") for one in (decided, taken)]
        self._write("steps", live, [list(asked), *decisions, _RESULTS.dump_python(results, mode="json")])


@dataclass(frozen=True)
class Replayed:
    """A decision of a file, made again. position: committed tokens before it. recorded, again: what was decided then and now.
    replay_seconds: of replays before it. deciding, learning: seconds that these take now. lost: plain steps that the budget was
    charged."""

    position: int
    recorded: Decision
    again: Decision
    results: list[StepResult]
    replay_seconds: float
    deciding: float
    learning: float
    lost: float

    @property
    def is_same(self) -> bool:
        return self.recorded == self.again

    @property
    def tokens(self) -> float:
        return sum(one.tokens for one in self.results)

    @property
    def seconds(self) -> float:
        """Of its steps, and of the replays before them."""
        return self.replay_seconds + sum(one.seconds for one in self.results)

    @property
    def steps(self) -> int:
        return sum(one.steps for one in self.results)


def replayed(path: Path, clock: Callable[[], float]) -> Iterator[Replayed]:
    """All decisions of a file, made again. clock: seconds, for the time that deciding and learning take.

    ValueError with the line for a file that is no log of this version; OSError for one that cannot be read.
    """
    policies: dict[tuple[int, ...], Policy] = {}
    replay_seconds = 0.0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                event = json.loads(line)
                writer = tuple(event.pop("writer"))
                ((kind, values),) = event.items()
                if kind == "state":
                    policies[writer] = policy_from_json(values)
                elif kind == "request":
                    for one in [one for key, one in policies.items() if key[0] == writer[0]]:
                        one.begin_request()
                elif kind == "replay":
                    policies[writer].observe_replay(*values)
                    replay_seconds += values[3]
                elif (found := _steps(clock, policies[writer], kind, *values)) is not None:
                    yield replace(found, replay_seconds=replay_seconds)
                    replay_seconds = 0.0
            except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise ValueError(
                    f"{path}, line {number}: this is no record of auto's decisions, or of another version ({error!r:.120})"
                ) from error


def _steps(
    clock: Callable[[], float], policy: Policy, kind: str, asked: Sequence[Any], decided: Any, taken: Any, results: Any
) -> Replayed | None:
    """Decide again and learn. None if nothing was decided."""
    if kind != "steps":
        raise ValueError(f"an event {kind!r} that nobody knows")
    done, taken, before = _RESULTS.validate_python(results), _DECISION.validate_python(taken), policy.position
    began = clock()
    again = policy.decide(*asked)
    decided_at, balance = clock(), policy.budget.request
    policy.observe(taken, done)
    learnt_at, tokens = clock(), sum(one.tokens for one in done)
    if decided is None:
        return None
    lost = balance + policy.budget.slack * tokens - policy.budget.request
    return Replayed(
        before, _DECISION.validate_python(decided), again, done, 0.0, decided_at - began, learnt_at - decided_at, lost
    )
