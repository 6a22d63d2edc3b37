"""Threads that use one model take turns, step by step, and an error in the middle of a step leaves the model usable."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LogitsProcessorList,
    MistralForCausalLM,
    StoppingCriteriaList,
    TextIteratorStreamer,
)

import skipstone
from skipstone.engines.model_lock import ModelLock, lock_of
from skipstone.lab.check.check import Checker, CheckScale
from tests.helpers import families
from tests.helpers.conformance import ROWS
from tests.helpers.pairwise import round_robin
from tests.helpers.settings import QUIET
from tests.helpers.support import decode, tokenizer

pytestmark = QUIET
ENGINES = ("native", "eager")
SECONDS = 60  # after which a thread that should have ended is taken for one that waits forever
IDS = torch.arange(1, 13)[None]


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """What calls return that begin together, each in a thread of its own. The first error is raised."""
    start, found, errors = threading.Barrier(len(calls)), [None] * len(calls), []

    def run(place: int, call: Callable[[], Any]) -> None:
        start.wait()
        try:
            found[place] = call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "a thread waits for another one"
    if errors:
        raise errors[0]
    return found


def fresh(epsilon: float, layers: int = 4) -> LlamaForCausalLM:
    """A model that nobody has used. epsilon: makes its config one that was not verified yet."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=epsilon,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def test_a_thread_that_releases_the_lock_goes_behind_those_that_wait() -> None:
    lock, order, both = ModelLock(), [], threading.Barrier(2)

    def take(name: str) -> None:
        both.wait()
        for _ in range(50):
            with lock:
                order.append(name)
                threading.Event().wait(0.002)  # the other one has come to wait meanwhile

    in_threads(lambda: take("a"), lambda: take("b"))
    runs = [order[place : place + 3] for place in range(90)]
    assert not any(len(set(run)) == 1 for run in runs), order


def test_the_lock_is_free_after_an_interrupted_wait_and_within_its_own_thread() -> None:
    lock = ModelLock()
    with lock, lock:
        pass
    assert in_threads(lambda: lock.acquire(blocking=False)) == [True]


@round_robin(engine=ENGINES, other=["layerskip", "swift", "adadecode", "speculative", "prompt_lookup", "auto"])
def test_threads_on_one_model_get_the_texts_that_they_get_alone(engine: str, other: str) -> None:
    """Methods share the model, its engine's buffers, and what they learn of it; a draft model writes texts of its own."""
    model = families.build("llama")
    methods = [ROWS[name].method("llama", 4, "standard") for name in ("autoregressive", "layerskip", other)]
    calls = [(model, method) for method in methods] + [
        (getattr(methods[-1], "draft_model", None) or model, skipstone.Autoregressive())
    ]
    prompts = families.prompts(2, seed=3)

    def text(network: Any, method: Any) -> Any:
        return decode(network, prompts, method, engine=engine, do_sample=False, max_new_tokens=40).new_tokens

    alone = [text(*call) for call in calls]
    for _ in range(3):
        assert in_threads(*(lambda call=call: text(*call) for call in calls)) == alone


@pytest.mark.parametrize("engine", ENGINES)
def test_a_paused_stream_blocks_nobody(engine: str) -> None:
    model = families.build("llama")
    method = skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4)
    expected = skipstone.generate(model, IDS, method, engine=engine, max_new_tokens=30).new_tokens
    steps: Iterator[Any] = skipstone.stream(model, IDS, method, engine=engine, max_new_tokens=30)
    tokens = list(next(steps).tokens[0])
    tokens += next(steps).tokens[0]
    (found,) = in_threads(lambda: skipstone.generate(model, IDS, method, engine=engine, max_new_tokens=30).new_tokens)
    assert found == expected
    for step in steps:
        tokens += step.tokens[0]
    assert [tokens] == expected
    abandoned = skipstone.stream(model, IDS, method, engine=engine, max_new_tokens=30)
    next(abandoned)
    assert in_threads(lambda: skipstone.generate(model, IDS, method, engine=engine, max_new_tokens=30).new_tokens) == [expected]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_streamer_that_nobody_reads_to_its_end_disturbs_no_later_call(engine: str) -> None:
    """As in a notebook: `enable`, stream in a thread, stop reading, and call `generate` again."""
    model: Any = skipstone.enable(families.build("llama"), "layerskip exit_layer=2", engine=engine)
    expected = model.generate(IDS, max_new_tokens=200)
    streamer = TextIteratorStreamer(tokenizer())
    thread = threading.Thread(target=lambda: model.generate(IDS, max_new_tokens=200, streamer=streamer), daemon=True)
    thread.start()
    next(iter(streamer))
    assert torch.equal(model.generate(IDS, max_new_tokens=200), expected)
    thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_may_use_a_model_for_the_first_time_at_once(engine: str) -> None:
    epsilon = {"native": 1.7e-5, "eager": 1.9e-5}[engine]
    expected = fresh(epsilon).generate(IDS, max_new_tokens=12, do_sample=False)[:, IDS.shape[1] :].tolist()
    model = fresh(epsilon + 1e-9)
    texts = in_threads(
        *[lambda: skipstone.generate(model, IDS, "autoregressive", engine=engine, max_new_tokens=12).new_tokens] * 4
    )
    assert texts == [expected] * 4


def test_a_model_runs_forward_in_another_thread_while_it_is_recognised() -> None:
    """The trace of the model's own forward is that of the thread that asked for it."""
    model: Any = fresh(2.3e-5)
    own, busy = fresh(2.3e-5)(IDS).logits, threading.Event()

    def elsewhere(*_: Any) -> None:
        if not busy.is_set():
            busy.set()
            (logits,) = in_threads(lambda: model(IDS).logits)
            assert torch.allclose(logits, own)

    handle = model.model.layers[1].register_forward_pre_hook(elsewhere)
    skipstone.ModelRunner(model, "eager")
    handle.remove()
    assert busy.is_set()


def test_models_that_share_a_config_are_recognised_in_turn() -> None:
    """Windows are small in the config while a model is traced: another model of the same config is not taken for such a one."""
    config = families.build("mistral").config
    config.sliding_window, config.rms_norm_eps = 32, 2.9e-5
    first, second = (MistralForCausalLM(config).eval() for _ in range(2))
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(skipstone.ModelRunner(second, "eager")), daemon=True)

    def elsewhere(*_: Any) -> None:
        if not thread.ident:
            thread.start()
            thread.join(1)  # what is not done by then waits for this one

    first.model.layers[1].register_forward_pre_hook(elsewhere)
    skipstone.ModelRunner(first, "eager")
    thread.join(SECONDS)
    assert [reach.window for reach in found[0].reaches] == [32] * 4


def test_the_models_own_forward_is_its_own_in_another_thread_during_a_pass() -> None:
    model: Any = families.build("llama")
    own, seen = model(IDS).logits, []
    method = skipstone.SelfSpeculative((1,), (2,), num_speculative_tokens=4)
    text = skipstone.generate(model, IDS, method, engine="eager", max_new_tokens=12).new_tokens

    def elsewhere(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            with torch.no_grad():
                seen.extend(in_threads(lambda: model(IDS).logits))

    handle = model.model.layers[3].register_forward_pre_hook(elsewhere)
    assert skipstone.generate(model, IDS, method, engine="eager", max_new_tokens=12).new_tokens == text
    handle.remove()
    assert seen
    assert all(torch.equal(logits, own) for logits in seen)


def test_a_check_beside_other_calls_leaves_their_defaults_alone() -> None:
    """`check` leaves the model's own generation defaults out of its texts, and out of its own only."""
    model: Any = families.build("llama")
    model.generation_config.max_new_tokens = 9
    model.generation_config.repetition_penalty = 1.4
    expected = skipstone.generate(model, IDS, "autoregressive").new_tokens
    checker = Checker(model, skipstone.LayerSkip(exit_layer=2), families.prompts(2), CheckScale(max_new_tokens=12, samples=20))
    done = threading.Event()

    def check() -> Any:
        try:
            return checker.run()
        finally:
            done.set()

    def texts() -> list[Any]:
        found = []
        while not done.is_set():
            found.append(skipstone.generate(model, IDS, "autoregressive").new_tokens)
        return found

    report, found = in_threads(check, texts)
    assert report.passed
    assert found
    assert all(text == expected for text in found)
    assert model.generation_config.max_new_tokens == 9


class Interrupt:
    """A processor, a criterion or an engine's call that raises the `count`-th time that it is asked."""

    def __init__(self, error: BaseException, count: int) -> None:
        self.error, self.left = error, count

    def __call__(self, *given: Any, **more: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return torch.zeros(len(given[0]), dtype=torch.bool) if given[1:] and given[1] is None else given[-1]


METHODS = {name: row for name, row in ROWS.items() if not row.variant}


@round_robin(engine=ENGINES, row=list(METHODS), place=["processor", "criterion", "pass"])
def test_the_next_call_works_after_an_error_inside_a_step(
    engine: str, row: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.build("llama")
    method = METHODS[row].method("llama", 4, "standard")

    def text(**options: Any) -> Any:
        return skipstone.generate(model, IDS, method, engine=engine, max_new_tokens=20, do_sample=False, **options).new_tokens

    expected = text()
    for count in (1, 2, 5):
        error = KeyboardInterrupt("Ctrl-C") if count != 2 else ArithmeticError("the user's own")
        interrupt, options = Interrupt(error, count), {}
        with monkeypatch.context() as patch:
            if place == "processor":
                options["logits_processor"] = LogitsProcessorList([interrupt])  # type: ignore[list-item]
            elif place == "criterion":
                options["stopping_criteria"] = StoppingCriteriaList([interrupt])  # type: ignore[list-item]
            else:
                _interrupt_passes(patch, skipstone.ModelRunner(model, engine).engine, interrupt)
            with pytest.raises(type(error)):
                text(**options)
        assert text() == expected, "the same thread"
        assert in_threads(text) == [expected], "another one"


def test_the_next_call_works_after_ctrl_c_while_a_model_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that were left behind would refuse the native engine."""
    model, hook, count = fresh(3.1e-5), torch.nn.Module.register_forward_hook, iter(range(100))

    def interrupted(*given: Any, **more: Any) -> Any:
        if next(count) == 5:
            raise KeyboardInterrupt
        return hook(*given, **more)

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "register_forward_hook", interrupted)
        with pytest.raises(KeyboardInterrupt):
            skipstone.generate(model, IDS, "autoregressive", engine="native", max_new_tokens=4)
    reference: Any = fresh(3.1e-5)
    expected = reference.generate(IDS, max_new_tokens=4, do_sample=False)[:, IDS.shape[1] :].tolist()
    assert skipstone.generate(model, IDS, "autoregressive", engine="native", max_new_tokens=4).new_tokens == expected


def _interrupt_passes(patch: pytest.MonkeyPatch, engine: Any, interrupt: Interrupt) -> None:
    """Ctrl-C arrives in the middle of an engine's call: when it has written keys and values, before it returns."""
    for name in ("run", "chain") if engine.supports_chains else ("run",):
        call = getattr(engine, name)

        def interrupted(*given: Any, call: Any = call, **more: Any) -> Any:
            return interrupt(call(*given, **more))

        patch.setattr(engine, name, interrupted)


FORK = """
    import os, sys, threading
    import torch
    import skipstone
    from tests.helpers import families

    engine = sys.argv[1]
    torch.set_num_threads(2)
    model, ids = families.build("llama"), torch.arange(1, 13)[None]

    def text():
        return skipstone.generate(model, ids, "layerskip exit_layer=2", engine=engine, max_new_tokens=20).new_tokens

    expected, stop = text(), threading.Event()

    def again():
        while not stop.is_set():
            text()

    busy = threading.Thread(target=again)
    busy.start()
    for _ in range(5):
        if (child := os.fork()) == 0:
            os._exit(0 if text() == expected else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert text() == expected
    stop.set()
    busy.join()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize("engine", ENGINES)
def test_parent_and_child_go_on_after_a_fork_amid_another_threads_steps(engine: str) -> None:
    run = [sys.executable, "-c", textwrap.dedent(FORK), engine]
    assert subprocess.run(run, timeout=300).returncode == 0


def test_a_child_process_finds_a_lock_free_that_another_thread_held() -> None:
    """What `os.fork` leaves behind, without a fork: the lock is renewed there."""
    lock, held, done = lock_of(families.build("llama")), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            done.wait(SECONDS)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    held.wait(SECONDS)
    other = ModelLock()
    other.acquire()
    other.renew()
    assert in_threads(lambda: other.acquire(blocking=False)) == [True]
    assert in_threads(lambda: lock.acquire(blocking=False)) == [False]
    done.set()
    holder.join(SECONDS)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
def test_a_fork_waits_for_a_thread_that_looks_at_weights() -> None:
    """The lock of `model_version` is free in the child, whatever other threads do."""
    script = """
        import os, signal, threading
        from skipstone.models.weight_version import model_version
        from tests.helpers import families

        model = families.build("llama")

        def again():
            while True:
                model_version(model)

        threading.Thread(target=again, daemon=True).start()
        for _ in range(8):
            if (child := os.fork()) == 0:
                signal.alarm(10)
                model_version(model)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], timeout=300).returncode == 0
