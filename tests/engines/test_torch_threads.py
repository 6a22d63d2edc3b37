"""torch's threads step back while the native engine decodes, and come back after it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from skipstone.decoding.draft import Draft
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.request import Request
from skipstone.decoding.session import Session
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.engines.torch_threads import SingleTorchThread
from tests.helpers import families


@pytest.fixture(autouse=True)
def several() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_host_thread_has_its_own_back() -> None:
    inside, leave, after = threading.Barrier(2), threading.Event(), []

    def other() -> None:
        torch.set_num_threads(3)
        with SingleTorchThread():
            inside.wait()
            leave.wait()
        after.append(torch.get_num_threads())

    thread = threading.Thread(target=other)
    with SingleTorchThread(), SingleTorchThread():
        assert torch.get_num_threads() == 1
        thread.start()
        inside.wait()
    assert torch.get_num_threads() == 2
    leave.set()
    thread.join()
    assert after == [3]
    assert torch.get_num_threads() == 2


def test_a_host_thread_that_begins_meanwhile_has_them_all() -> None:
    seen: list[int] = []

    def begins() -> None:
        torch.ones(3).add_(1)
        seen.append(torch.get_num_threads())

    with SingleTorchThread():
        thread = threading.Thread(target=begins)
        thread.start()
        thread.join()
        assert torch.get_num_threads() == 1
    assert seen == [2]


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_in_steps_on_the_native_engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if engine == "native" and (reason := library.missing()) is not None:
        pytest.skip(reason)
    seen: list[int] = []
    score = Session.score

    def watched(self: Session, draft: object) -> object:
        seen.append(torch.get_num_threads())
        return score(self, draft)  # type: ignore[arg-type]

    class Plain(Session):
        score = watched  # type: ignore[assignment]

        def draft(self, limit: list[int]) -> Draft:
            return Draft.empty(self.rows, self.root.device, self.forward(limit))

    decoder = DecodingLoop(Plain(ModelRunner(families.build("llama"), engine), 1, 20))
    decoder.admit(0, Request(torch.tensor([1, 2, 3]), 5))
    while decoder.busy:
        decoder.step()
        assert torch.get_num_threads() == 2
    assert set(seen) == {1 if engine == "native" else 2}
