"""Threads that use one model take turns, step by step, and an error in the middle of a step leaves the model usable."""

import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList, TextIteratorStreamer

import skipstone
from skipstone.engines.model_lock import ModelLock
from skipstone.lab.check.check import Checker, CheckScale
from tests.helpers import families
from tests.helpers.conformance import COMMON, ROWS
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


def fresh(epsilon: float) -> Any:
    """A model that nobody has used. epsilon: makes its config one that was not verified yet."""
    return families.build("llama", rms_norm_eps=epsilon)


def plain_text(epsilon: float, tokens: int) -> list[list[int]]:
    return fresh(epsilon).generate(IDS, max_new_tokens=tokens, do_sample=False)[:, IDS.shape[1] :].tolist()


def test_a_thread_that_releases_the_lock_goes_behind_those_that_wait() -> None:
    lock, order, both = ModelLock(), [], threading.Barrier(2)
    with lock, lock:  # its own thread may enter it again
        pass

    def take(name: str) -> None:
        both.wait()
        for _ in range(50):
            with lock:
                order.append(name)
                threading.Event().wait(0.002)  # the other one has come to wait meanwhile

    in_threads(lambda: take("a"), lambda: take("b"))
    runs = [order[place : place + 3] for place in range(90)]
    assert not any(len(set(run)) == 1 for run in runs), order


@round_robin(engine=ENGINES, other=["layerskip", "swift", "adadecode", "speculative", "prompt_lookup", "auto"])
def test_threads_on_one_model_get_the_texts_that_they_get_alone(engine: str, other: str) -> None:
    model = families.build("llama")
    methods = [ROWS[name].method("llama", 4, "standard") for name in ("autoregressive", "layerskip", other)]
    second = getattr(methods[-1], "draft_model", None) or model
    calls = [*((model, method) for method in methods), (second, skipstone.Autoregressive())]
    prompts = families.prompts(2, seed=3)

    def text(network: Any, method: Any) -> Any:
        return decode(network, prompts, method, engine=engine, do_sample=False, max_new_tokens=24).new_tokens

    alone = [text(*call) for call in calls]
    for _ in range(2):
        assert in_threads(*(lambda call=call: text(*call) for call in calls)) == alone


@pytest.mark.parametrize("engine", ENGINES)
def test_a_paused_stream_blocks_nobody(engine: str) -> None:
    model = families.build("llama")
    options: dict[str, Any] = {"engine": engine, "max_new_tokens": 30}
    method = skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4)
    expected = skipstone.generate(model, IDS, method, **options).new_tokens
    steps: Iterator[Any] = skipstone.stream(model, IDS, method, **options)
    tokens = [*next(steps).tokens[0], *next(steps).tokens[0]]
    assert in_threads(lambda: skipstone.generate(model, IDS, method, **options).new_tokens) == [expected]
    for step in steps:
        tokens += step.tokens[0]
    assert [tokens] == expected
    next(skipstone.stream(model, IDS, method, **options))  # it is abandoned
    assert in_threads(lambda: skipstone.generate(model, IDS, method, **options).new_tokens) == [expected]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_streamer_that_nobody_reads_to_its_end_disturbs_no_later_call(engine: str) -> None:
    model: Any = skipstone.enable(families.build("llama"), "layerskip exit_layer=2", engine=engine)
    expected = model.generate(IDS, max_new_tokens=40)
    streamer = TextIteratorStreamer(tokenizer())
    thread = threading.Thread(target=lambda: model.generate(IDS, max_new_tokens=40, streamer=streamer), daemon=True)
    thread.start()
    next(iter(streamer))
    assert torch.equal(model.generate(IDS, max_new_tokens=40), expected)
    thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.mark.parametrize("engine", ENGINES)
def test_threads_may_use_a_model_for_the_first_time_at_once(engine: str) -> None:
    epsilon = {"native": 1.7e-5, "eager": 1.9e-5}[engine]
    model = fresh(epsilon)
    call = lambda: skipstone.generate(model, IDS, "autoregressive", engine=engine, max_new_tokens=12).new_tokens  # noqa: E731
    assert in_threads(*[call] * 4) == [plain_text(epsilon, 12)] * 4


@pytest.mark.usefixtures("untested")
def test_a_model_runs_forward_in_another_thread_while_it_is_recognised() -> None:
    """The trace of the model's own forward is that of the thread that asked for it."""
    model = fresh(2.3e-5)
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


@pytest.mark.usefixtures("untested")
def test_models_that_share_a_config_are_recognised_one_after_the_other() -> None:
    """Windows are small in the config while a model is traced: another model of the same config is not taken for such a one."""
    first: Any = families.build("mistral", sliding_window=32, rms_norm_eps=2.9e-5)
    second, found = type(first)(first.config).eval(), []
    thread = threading.Thread(target=lambda: found.append(skipstone.ModelRunner(second, "eager")), daemon=True)

    def elsewhere(*_: Any) -> None:
        if not thread.ident:
            thread.start()
            thread.join(0.5)  # what is not done by then waits for this one

    first.model.layers[1].register_forward_pre_hook(elsewhere)
    skipstone.ModelRunner(first, "eager")
    thread.join(SECONDS)
    assert [reach.window for reach in found[0].reaches] == [32] * 4


def test_the_models_own_forward_is_its_own_in_another_thread_during_a_pass() -> None:
    model: Any = families.build("llama")
    own, seen = model(IDS).logits, []
    method = skipstone.SelfSpeculative((1,), (2,), num_speculative_tokens=4)

    def text() -> Any:
        return skipstone.generate(model, IDS, method, engine="eager", max_new_tokens=6).new_tokens

    def elsewhere(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            with torch.no_grad():
                seen.extend(in_threads(lambda: model(IDS).logits))

    expected = text()
    handle = model.model.layers[3].register_forward_pre_hook(elsewhere)
    assert text() == expected
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
    done, found = threading.Event(), []

    def check() -> Any:
        try:
            return checker.run()
        finally:
            done.set()

    def texts() -> None:
        while not done.is_set():
            found.append(skipstone.generate(model, IDS, "autoregressive").new_tokens)

    report, _ = in_threads(check, texts)
    assert report.passed
    assert found
    assert all(text == expected for text in found)
    assert model.generation_config.max_new_tokens == 9


class Interrupt:
    """A processor, a criterion or an engine's call that raises the `count`-th time that it is called."""

    def __init__(self, error: BaseException, count: int) -> None:
        self.error, self.left = error, count

    def __call__(self, *given: Any, **more: Any) -> Any:
        self.left -= 1
        if self.left == 0:
            raise self.error
        return torch.zeros(len(given[0]), dtype=torch.bool) if given[1:] and given[1] is None else given[-1]


@round_robin(engine=ENGINES, row=list(COMMON), place=["processor", "criterion", "pass"])
def test_the_next_call_works_after_an_error_inside_a_step(
    engine: str, row: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.build("llama")
    method = COMMON[row].method("llama", 4, "standard")

    def text(**options: Any) -> Any:
        return skipstone.generate(model, IDS, method, engine=engine, max_new_tokens=20, do_sample=False, **options).new_tokens

    expected = text()
    for count, error in ((1, KeyboardInterrupt()), (2, ArithmeticError("the user's own")), (5, KeyboardInterrupt())):
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


@pytest.mark.usefixtures("untested")
def test_the_next_call_works_after_ctrl_c_while_a_model_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks that were left behind would refuse the native engine."""
    model, hook, count = fresh(3.1e-5), torch.nn.Module.register_forward_hook, iter(range(100))

    def interrupted(*given: Any, **more: Any) -> Any:
        if next(count) == 5:
            raise KeyboardInterrupt
        return hook(*given, **more)

    def text() -> Any:
        return skipstone.generate(model, IDS, "autoregressive", engine="native", max_new_tokens=4).new_tokens

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.Module, "register_forward_hook", interrupted)
        with pytest.raises(KeyboardInterrupt):
            text()
    assert text() == plain_text(3.1e-5, 4)


def _interrupt_passes(patch: pytest.MonkeyPatch, engine: Any, interrupt: Interrupt) -> None:
    """Ctrl-C arrives in the middle of an engine's call: when it has written keys and values, before it returns."""
    for name in ("run", "chain") if engine.supports_chains else ("run",):
        call = getattr(engine, name)

        def interrupted(*given: Any, call: Any = call, **more: Any) -> Any:
            return interrupt(call(*given, **more))

        patch.setattr(engine, name, interrupted)


FORK = """
    import os, signal, sys, threading
    import torch
    import skipstone
    from skipstone.models.weight_version import model_version
    from tests.helpers import families

    engine = sys.argv[1]
    torch.set_num_threads(2)
    model, ids, large = families.build("llama"), torch.arange(1, 13)[None], torch.randn(4_000_000)

    def text():
        return skipstone.generate(model, ids, "layerskip exit_layer=2", engine=engine, max_new_tokens=12).new_tokens

    def again(call):
        while not stop.wait(0.001):
            call()

    large.exp()  # on several threads, which no fork has
    expected, stop = text(), threading.Event()
    for fork in range(4):
        if (child := os.fork()) == 0:
            signal.alarm(60)
            if fork == 0:
                large.exp()
            model_version(model)
            os._exit(0 if text() == expected else 1)
        assert os.waitpid(child, 0)[1] == 0
        assert text() == expected
        if fork == 0:  # from now on other threads decode and look at weights
            for call in (text, lambda: model_version(model)):
                threading.Thread(target=again, args=(call,), daemon=True).start()
    os._exit(0)  # whatever the other threads do
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")
@pytest.mark.parametrize("engine", ENGINES)
def test_parent_and_child_go_on_after_a_fork_amid_another_threads_steps(engine: str) -> None:
    run = [sys.executable, "-c", textwrap.dedent(FORK), engine]
    assert subprocess.run(run, timeout=300).returncode == 0
