"""Copies of the weights that are made in the background: the same bytes, only while no request runs, and never in a request."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import skipstone
from skipstone.decoding.loop import DecodingLoop, run
from skipstone.decoding.request import Request
from skipstone.engines import background_copy, choose_engine
from skipstone.engines.mapped_loading import load_for_decoding
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import packed_cache, weights
from skipstone.methods.auto import auto
from skipstone.methods.auto.auto import COPY_DRAFTER, Auto
from skipstone.methods.auto.saved_profile import SavedPolicy
from skipstone.models.weight_files import WeightFiles
from skipstone.policy.choose_drafter import DrafterState, Policy, Rate
from skipstone.policy.cost_model import LearnedCosts, MeanTime
from tests.helpers import families
from tests.helpers.machine import llama, prompt
from tests.helpers.native import NATIVE_ONLY
from tests.helpers.support import tokenizer

pytestmark = NATIVE_ONLY


def panels(runner: ModelRunner) -> list[bytes]:
    engine: Any = runner.engine
    return [bytes(one.numpy()) for one in engine._weights.memory]


def prepare(runner: ModelRunner, method: Auto | None = None) -> threading.Thread:
    """The thread that makes the copy."""
    (method or Auto()).prepare_in_background(runner)
    return background_copy._THREADS.known(runner.model)["int4"]


def has_copy_as_candidate(runner: ModelRunner, *sets_up: str) -> bool:
    return any("int4" in one.spelled for one in Auto().methods(runner, sets_up=sets_up))


@pytest.mark.parametrize("family", ["llama", "phi3"])
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_a_copy_in_pieces_has_the_bytes_of_one_that_is_made_at_once(
    family: str, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_WEIGHTS", 1)
    raw, pauses = families.build(family, hidden_size=64, intermediate_size=200), []
    one, other = (
        ModelRunner(raw, "native"),
        ModelRunner(families.build(family, hidden_size=64, intermediate_size=200), "native"),
    )
    one.make_copy(quantize, lambda: pauses.append(threading.current_thread()))
    assert one.has_copy(quantize)
    assert panels(one.in_fewer_bits(quantize)) == panels(other.in_fewer_bits(quantize))
    assert len(pauses) > 20


def test_a_copy_is_made_only_while_no_request_runs_and_is_then_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_copy, "WAIT_SECONDS", 0.001)
    raw = llama()
    runner = ModelRunner(raw, "native")
    steps = skipstone.stream(raw, prompt(9)[None], "autoregressive", max_new_tokens=9)
    next(steps)
    thread = prepare(runner)
    thread.join(0.05)
    assert thread.is_alive()
    assert not runner.has_copy("int4")
    assert len(list(steps)) == 8
    thread.join(10)
    assert runner.has_copy("int4")
    assert has_copy_as_candidate(runner)


def test_a_running_drafter_takes_the_copy_with_its_next_request() -> None:
    runner = ModelRunner(llama(), "native")
    decoder = DecodingLoop(Auto().start(runner, 2, 48))
    drafter: Any = decoder.session.drafter
    decoder.admit(0, Request(prompt(9), 30))
    decoder.step()
    runner.in_fewer_bits("int4")
    assert not drafter.candidates
    decoder.admit(1, Request(prompt(5), 30))
    assert list(drafter.candidates) == ["self_speculative, int4"]
    assert "self_speculative, int4" in drafter.learned.policy.drafters
    while decoder.busy:
        decoder.step()


def test_too_little_memory_is_no_reason_to_fail_but_to_do_without(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (ModelRunner(llama(), "native") for _ in range(2))
    (thread := prepare(one, Auto(max_extra_memory_bytes=1000))).join(10)
    with monkeypatch.context() as patch:
        patch.setattr(choose_engine, "available_memory_bytes", lambda: 1000)
        prepare(other).join(10)
    assert (choose_engine.copies_of(one.model), choose_engine.copies_of(other.model)) == ({}, {})
    (again := prepare(one)).join(10)
    assert again is not thread
    assert list(choose_engine.copies_of(one.model)) == ["int4"]
    assert prepare(one) is again, "there is a copy now"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, next to an empty cache."""
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "cache"))
    families.build("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_copy_of_a_checkpoint_is_mapped_by_the_next_process_and_never_made_in_a_request(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded() -> ModelRunner:
        return ModelRunner(load_for_decoding(folder)[0])

    first, second, third = loaded(), loaded(), loaded()
    assert not has_copy_as_candidate(first, "int4")
    prepare(first).join(10)
    (entry,) = packed_cache.entries()
    assert entry.about["quantize"] == "int4"

    def refuse(*_: Any) -> None:
        raise AssertionError("weights are packed in a request")

    monkeypatch.setattr(weights.NativeWeights, "_pack", refuse)
    slow = Policy(LearnedCosts(MeanTime(1.0)), {COPY_DRAFTER: DrafterState(Rate(1.0, 99.0))})
    assert list(Auto().waiting(second, None)) == ["int4"]
    assert not Auto().waiting(second, SavedPolicy(slow, {}, {}, {})), "it did not pay before"
    assert not has_copy_as_candidate(second), "it is mapped when the budget pays for that"
    assert has_copy_as_candidate(second, "int4")
    assert panels(second.in_fewer_bits("int4")) == panels(first.in_fewer_bits("int4"))
    entry.path.write_bytes(entry.path.read_bytes()[:-1])
    assert not has_copy_as_candidate(third, "int4")


@pytest.mark.parametrize(("seconds", "is_mapped"), [(0.0, True), (9.0, False)])
def test_a_copy_on_the_disk_is_mapped_inside_a_text_if_the_budget_pays_for_it(
    seconds: float, is_mapped: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, runner = (ModelRunner(load_for_decoding(folder)[0]) for _ in range(2))
    Auto().make_copy(made)
    monkeypatch.setattr(auto, "PAYING_STEP_SECONDS", 0.0)
    monkeypatch.setattr(auto, "COPY_SECONDS", seconds)
    monkeypatch.setattr(auto.AutoDrafter, "setup_seconds", lambda *_: 0.0)
    decoder = DecodingLoop(Auto().start(runner, 1, 96))
    drafter: Any = decoder.session.drafter
    decoder.admit(0, Request(prompt(9), 60))
    decoder.step()
    assert not runner.has_copy("int4")
    texts = [token for step in run(decoder) for token in step.tokens[0]]
    assert len(texts) >= 59
    assert runner.has_copy("int4") == is_mapped
    assert (COPY_DRAFTER in drafter.candidates) == is_mapped


def test_a_copy_is_written_in_pieces_and_mapped_without_the_model_s_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "PIECE_BYTES", 1000)
    monkeypatch.setattr(packed_cache, "FLUSH_BYTES", 3000)
    one, other = (ModelRunner(load_for_decoding(folder)[0]) for _ in range(2))
    pauses = list[int]()
    engine = one.copy_in("int4")
    assert engine.cache_panels(one.model, pauses.append)
    assert len(pauses) > len(panels(one.in_fewer_bits("int4")))
    (entry,) = packed_cache.entries()
    assert packed_cache.damaged(entry) == []
    mapped, own = threading.Event(), choose_engine.PreparedModel.map_copy

    def map_copy(*arguments: Any) -> Any:
        engine = own(*arguments)
        mapped.set()
        return engine

    monkeypatch.setattr(choose_engine.PreparedModel, "map_copy", map_copy)
    with other.lock:
        thread = prepare(other)
        assert mapped.wait(10)
        assert not other.has_copy("int4")
    thread.join(10)
    assert other.has_copy("int4")


def test_a_copy_of_a_checkpoint_that_was_replaced_meanwhile_is_not_cached(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner = ModelRunner(load_for_decoding(folder)[0])
    monkeypatch.setattr(WeightFiles, "is_current", lambda _: False)
    prepare(runner).join(10)
    assert runner.has_copy("int4")
    assert [one.message.split(":")[0] for one in caplog.records] == ["the copy in int4 is not in the disk's cache"]


PROGRAM = """
import sys, threading, time
from skipstone.engines import background_copy
from skipstone.engines.mapped_loading import load_for_decoding
from skipstone.engines.model_runner import ModelRunner

model, _ = load_for_decoding(sys.argv[1])
runner = ModelRunner(model)
begun = threading.Event()
def make_copy(quantize, pause):
    begun.set()
    while True:
        pause()
        time.sleep(0.001)
runner.make_copy = make_copy
background_copy.make_in_background(runner, "int4")
begun.wait(10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of threads are Linux's")
def test_the_thread_has_the_lowest_priority_and_ends_with_the_process(folder: Path) -> None:
    found = []

    def look() -> None:
        background_copy.take_lowest_priority()
        found.append(os.sched_getscheduler(0) == os.SCHED_IDLE or os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found in ([True], [background_copy.LOWEST_NICENESS])
    assert os.sched_getscheduler(0) != os.SCHED_IDLE, "this thread keeps its own"
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
