"""How many threads the native engine takes. torch's threads step back while it decodes, and come back after it."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from skipstone import Autoregressive
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.request import Request
from skipstone.decoding.session import Session
from skipstone.engines import model_lock
from skipstone.engines.model_lock import SingleTorchThread
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library, threads
from tests.helpers import families


class Machine:
    """A clock that work moves on. milliseconds: the time of the work on so many threads, by the number of calls with them."""

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
        (2, lambda count, _: 900.0 / count, 2),
    ],
    ids=[
        "one core",
        "both pay",
        "the second harms",
        "nearly equal",
        "a calm moment",
        "asleep",
        "memory-bound",
        "half is best",
        "large",
    ],
)
def test_the_fastest_number_is_taken(
    most: int, milliseconds: Callable[[int, int], float], chosen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(monkeypatch, milliseconds)
    assert threads.fastest(machine.run, most) == chosen
    rounds = threads.MIN_ROUNDS if milliseconds(1, 0) > 100 else threads.MAX_ROUNDS  # a large model is not tried for long
    assert len(machine.calls) == (0 if most == 1 else 2 * rounds * len({1, most // 2, most}))


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


@pytest.fixture
def several() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("several")
def test_every_host_thread_has_its_own_back() -> None:
    inside, leave, counts = threading.Barrier(2), threading.Event(), []

    def other() -> None:
        torch.ones(3).add_(1)
        counts.append(torch.get_num_threads())
        torch.set_num_threads(3)
        with SingleTorchThread():
            inside.wait()
            leave.wait()
        counts.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    with SingleTorchThread(), SingleTorchThread():
        assert torch.get_num_threads() == 1
        thread.start()
        inside.wait()
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    leave.set()
    thread.join()
    assert counts == [2, 3]
    with pytest.raises(KeyError), SingleTorchThread():
        raise KeyError
    assert torch.get_num_threads() == 2, "after an error, too"


@pytest.mark.usefixtures("several")
def test_another_packages_openmp_is_not_taken_for_torchs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    maps = model_lock.MAPS.read_text()
    monkeypatch.setattr(model_lock, "MAPS", tmp_path / "maps")
    other = tmp_path / "libgomp-other.so.1"  # as scikit-learn's, at a lower address
    (tmp_path / "maps").write_text(f"7f00-7f01 r-xp 00000000 fe:00 1 {other}\n{maps}")
    model_lock._openmp.cache_clear()
    try:
        with SingleTorchThread():
            assert torch.get_num_threads() == 1
    finally:
        model_lock._openmp.cache_clear()


@pytest.mark.usefixtures("several")
@pytest.mark.parametrize("engine", ["eager", "native"])
def test_in_steps_on_the_native_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "native" and (reason := library.missing()) is not None:
        pytest.skip(reason)
    seen, score = [], Session.score
    monkeypatch.setattr(Session, "score", lambda self, draft: seen.append(torch.get_num_threads()) or score(self, draft))
    decoder = Autoregressive().start(ModelRunner(families.build("llama"), engine), 1, 20)
    loop = DecodingLoop(decoder)
    loop.admit(0, Request(torch.tensor([1, 2, 3]), 5))
    while loop.busy:
        loop.step()
        assert torch.get_num_threads() == 2
    assert set(seen) == {1 if engine == "native" else 2}
