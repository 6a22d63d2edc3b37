"""How many threads the native engine takes. torch's threads step back while it decodes, and come back after it."""

import threading
from collections.abc import Iterator
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
from skipstone.engines.native import engine as native_engine
from skipstone.engines.native import library, threads
from tests.helpers import families


def machine(root: Path, groups: str, siblings: dict[int, str], limits: dict[str, str]) -> Path:
    """A folder with the kernel's files. groups: the process's cgroups. siblings: of CPUs. limits: files of cgroups."""
    files = {"proc/self/cgroup": groups} | {f"sys/fs/cgroup/{name}": text for name, text in limits.items()}
    files |= {f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": text for cpu, text in siblings.items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


V1 = "5:memory:/slice/box\n4:cpu,cpuacct:/slice/box\n0::/"
HYPERTHREADS = {0: "0,4", 1: "1,5", 2: "2,6", 3: "3,7", 4: "0,4", 5: "1,5", 6: "2,6", 7: "3,7"}


@pytest.mark.parametrize(
    ("affinity", "groups", "siblings", "limits", "expected"),
    [
        ({0, 1, 2}, "", {}, {}, 3),
        (set(range(100)), "", {}, {}, 100),
        (set(range(8)), "", HYPERTHREADS, {}, 4),
        ({0, 2, 4, 5}, "", HYPERTHREADS, {}, 3),
        (set(range(8)), "0::/", {}, {"cpu.max": "max 100000"}, 8),
        (set(range(8)), "0::/box", {}, {"box/cpu.max": "350000 100000"}, 3),
        (set(range(8)), "0::/box", {}, {"box/cpu.max": "50000 100000"}, 1),
        (set(range(8)), "0::/a/b/c", {}, {"a/b/c/cpu.max": "max 100000", "a/b/cpu.max": "50000 20000"}, 2),
        (set(range(8)), "0::/seen/outside", {}, {"cpu.max": "500000 100000"}, 5),
        (set(range(8)), "0::/a", {}, {"cpu.max": "200000 100000", "a/cpu.max": "600000 100000"}, 2),
        (set(range(8)), V1, {}, {f"cpu/slice/box/cpu.cfs_{name}_us": "300000" for name in ("quota", "period")}, 1),
        (set(range(8)), V1, {}, {"cpu/slice/cpu.cfs_quota_us": "700000", "cpu/slice/cpu.cfs_period_us": "200000"}, 3),
        (set(range(8)), V1, {}, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (set(range(8)), V1, {}, {"memory/slice/box/cpu.max": "1 1"}, 8),
        (set(range(8)), "0::/", HYPERTHREADS, {"cpu.max": "600000 100000"}, 4),
        ({0, 4}, "0::/", HYPERTHREADS, {"cpu.max": "600000 100000"}, 1),
    ],
    ids=[
        "affinity",
        "more than the engine has threads",
        "siblings once",
        "siblings in the mask",
        "no quota",
        "rounded down",
        "at least one",
        "of a parent",
        "of a container whose path is the host's",
        "the smallest",
        "version 1",
        "version 1, of a parent",
        "version 1, no quota",
        "version 1, not of the CPU",
        "siblings below the quota",
        "one core",
    ],
)
def test_all_cores_that_the_process_may_use_are_taken(
    affinity: set[int],
    groups: str,
    siblings: dict[int, str],
    limits: dict[str, str],
    expected: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: affinity)
    assert threads.cores(machine(tmp_path, groups, siblings, limits)) == expected


@pytest.mark.skipif(library.missing() is not None, reason="the native engine does not run here")
@pytest.mark.parametrize(("cores", "hidden", "expected"), [(3, 64, 3), (64, 64, 4), (64, 40, 3), (1, 64, 1), (100, 1056, 64)])
def test_no_thread_is_without_work(cores: int, hidden: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A product computes 16 outputs at a time."""
    monkeypatch.delenv(threads.VARIABLE, raising=False)
    monkeypatch.setattr(native_engine, "cores", lambda: cores)
    model = families.build("llama", hidden_size=hidden)
    assert ModelRunner(model, "native").engine.detail.endswith(f" {expected} threads")


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
