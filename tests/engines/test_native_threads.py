"""How many threads the native engine takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library, threads
from tests.helpers import families


class Machine:
    """A clock that work moves on. milliseconds: what the work takes on so many threads, of every call with them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, milliseconds: Callable[[int, int], float]) -> None:
        self.now, self.milliseconds, self.calls = 0.0, milliseconds, []
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self.now)

    def run(self, count: int) -> None:
        self.now += self.milliseconds(count, self.calls.count(count)) / 1000
        self.calls.append(count)


@pytest.mark.parametrize(
    ("most", "milliseconds", "chosen"),
    [
        (1, lambda count, _: 1.0, 1),
        (2, lambda count, _: 1.0 / count, 2),
        (2, lambda count, _: float(count), 1),
        (2, lambda count, _: 1.05 if count == 2 else 1.0, 2),
        (2, lambda count, turn: 0.6 if count == 2 and turn == 3 else 1.0 * count, 2),
        (2, lambda count, turn: {1: 1.0, 2: 0.6 if turn % 2 else 3.0}[count], 2),
        (8, lambda count, _: 1.0 / min(count, 4), 8),
        (8, lambda count, _: {1: 1.0, 4: 0.3, 8: 0.5}[count], 4),
    ],
    ids=["one core", "both pay", "the second harms", "nearly equal", "a calm moment", "asleep", "memory-bound", "half is best"],
)
def test_the_fastest_number_is_taken(
    most: int, milliseconds: Callable[[int, int], float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, milliseconds)
    assert threads.fastest(machine.run, most) == chosen
    assert len(machine.calls) == (0 if most == 1 else 2 * threads.MAX_ROUNDS * len({1, most // 2, most}))


def test_a_large_model_is_not_tried_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, lambda count, _: 900.0 / count)
    assert threads.fastest(machine.run, 2) == 2
    assert len(machine.calls) == 2 * threads.MIN_ROUNDS * 2


def test_what_the_user_says_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(threads.VARIABLE, "3")
    assert threads.requested_number() == 3
    if library.missing() is None:
        engine = ModelRunner(families.build("llama"), "native").engine
        assert engine.detail.endswith("3 threads")
    for wrong in ("0", "65", "two", "\u00b2"):
        monkeypatch.setenv(threads.VARIABLE, wrong)
        with pytest.raises(ValueError, match="SKIPSTONE_THREADS must be a whole number from 1 to 64, found"):
            threads.requested_number()
    monkeypatch.setenv(threads.VARIABLE, "")
    assert threads.requested_number() is None
    monkeypatch.delenv(threads.VARIABLE)
    assert threads.requested_number() is None
