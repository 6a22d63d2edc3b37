"""How many threads the native engine takes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from skipstone.models.engines.native import library, threads
from skipstone.models.layered import LayeredModel
from tests.helpers import families


class Machine:
    """A clock that work moves on. seconds: what the work takes on so many threads, of every round."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int, int], float]) -> None:
        self.now, self.seconds, self.calls = 0.0, seconds, []
        monkeypatch.setattr(threads.time, "perf_counter", lambda: self.now)

    def run(self, count: int) -> None:
        self.now += self.seconds(count, self.calls.count(count))
        self.calls.append(count)


@pytest.mark.parametrize(
    ("most", "seconds", "chosen"),
    [
        (1, lambda count, _: 1.0, 1),
        (2, lambda count, _: 1.0 / count, 2),
        (2, lambda count, _: float(count), 1),
        (2, lambda count, _: 1.05 if count == 2 else 1.0, 2),
        (2, lambda count, turn: 0.6 if count == 2 and turn == 3 else 1.0 * count, 2),
        (8, lambda count, _: 1.0 / min(count, 4), 8),
        (8, lambda count, _: {1: 1.0, 4: 0.3, 8: 0.5}[count], 4),
    ],
    ids=["one core", "both pay", "the second harms", "nearly equal", "a calm moment", "memory-bound", "half is best"],
)
def test_the_fastest_number_is_taken(
    most: int, seconds: Callable[[int, int], float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, seconds)
    assert threads.fastest(machine.run, most) == chosen
    assert len(machine.calls) == (0 if most == 1 else threads.ROUNDS * len({1, most // 2, most}))


def test_what_the_user_says_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(threads.VARIABLE, "3")
    assert threads.asked() == 3
    if library.missing() is None:
        engine = LayeredModel(families.build("llama"), "native").engine
        assert engine.detail.endswith("3 threads")
    for wrong in ("0", "65", "two", "\u00b2"):
        monkeypatch.setenv(threads.VARIABLE, wrong)
        with pytest.raises(ValueError, match="SKIPSTONE_THREADS must be a whole number from 1 to 64, found"):
            threads.asked()
    monkeypatch.setenv(threads.VARIABLE, "")
    assert threads.asked() is None
    monkeypatch.delenv(threads.VARIABLE)
    assert threads.asked() is None
