"""Tests run on one thread each: two workers share two cores, and results do not depend on how work is split."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.helpers.hub import Hub

# A name that is no folder would be asked for at the hub, again and again where there is no network. It is set before a
# folder's conftest.py imports what reads it.
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_configure(config: pytest.Config) -> None:
    """Not in the process that only hands out tests: importing torch takes a second. Costs that were kept for one number
    of threads are measured anew for another."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        gc.disable()  # until all tests are imported, which makes hardly any garbage
        import torch

        torch.set_num_threads(1)
        os.environ.setdefault("SKIPSTONE_THREADS", "1")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is only for `make test-all` is slow, too, so that "not slow" leaves it out."""
    for item in items:
        if item.get_closest_marker("product"):
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """From here on there is garbage. The collector skips everything that is imported by now, and runs less often."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is kept between runs lies in a folder of the tests, not in the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SKIPSTONE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every model type counts as one that nobody has tested: a model is traced and verified."""
    from skipstone.models import recognition

    monkeypatch.setattr(recognition, "TESTED", frozenset())


@pytest.fixture(scope="session", autouse=True)
def _bandwidth_once() -> Iterator[None]:
    """How fast this machine's memory is takes a second to measure, and every benchmark asks."""
    from skipstone.lab.timing import machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "bandwidth", functools.cache(machine.bandwidth))
        yield


@pytest.fixture
def eager_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what transformers' modules are made to do."""
    monkeypatch.setenv("SKIPSTONE_ENGINE", "eager")


@pytest.fixture
def no_gradients() -> Iterator[None]:
    """For tests that compute with a model's layers themselves."""
    import torch

    with torch.no_grad():
        yield


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty hub that a test pushes to and loads from. Nothing but its own routes was asked for in the end."""
    from tests.helpers.hub import serving  # huggingface_hub reads the environment when it is imported, which comes later

    with serving(monkeypatch, tmp_path / "hub-cache") as made:
        yield made
        assert made.unknown == []
