"""What the native library answers to arguments that are wrong, logits that are no numbers, long prompts and a fork."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.engines.native.structs import declare
from tests.helpers import families

pytestmark = pytest.mark.skipif(library.missing() is not None, reason="the native engine is not built")
NAN = float("nan")


@pytest.fixture(scope="module")
def runner() -> ModelRunner:
    return ModelRunner(families.build("llama"), "native")


def in_process(*lines: str) -> str:
    """What a program prints."""
    run = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return run.stdout.strip()


@pytest.mark.parametrize("count", [-1, 0, 98, 1000])
@pytest.mark.parametrize("engine", ["eager", "native"])
def test_as_many_of_the_largest_as_there_are_not_are_refused(count: int, engine: str) -> None:
    model = ModelRunner(families.build("llama"), engine)
    with pytest.raises(ValueError, match=rf"between 1 and the 97 .*{count}"):
        model.top_k_tokens(torch.zeros(2, 97), count)


@pytest.mark.parametrize("engine", ["eager", "native"])
def test_of_logits_with_a_nan_no_token_is_the_largest(engine: str) -> None:
    model, logits = ModelRunner(families.build("llama"), engine), torch.randn(3, 97)
    expected = logits.topk(4).indices
    logits[1, 50] = NAN
    found = model.top_k_tokens(logits, 4)
    assert found[1].tolist() == [-1] * 4
    assert found[::2].equal(expected[::2])


@pytest.mark.parametrize("name", ["llama", "gemma2"])  # the second has soft caps, which limit what they are given
@pytest.mark.parametrize("quantize", ["none", "int8"])
def test_states_with_a_nan_have_no_likeliest_token_and_no_logit_hides_it(name: str, quantize: str) -> None:
    model = ModelRunner(families.build(name), "native", quantize)
    hidden = torch.randn(1, 5, model.config.hidden_size)
    expected = model.greedy_tokens(hidden)
    hidden[0, 2, 3] = NAN
    found = model.greedy_tokens(hidden)
    assert found[0, 2] == -1
    assert found[0, [0, 1, 3, 4]].equal(expected[0, [0, 1, 3, 4]])
    assert model.logits(hidden)[0, 2].isnan().all()
    best, probability = model.engine.score_exit(hidden, None)
    assert best[0, 2] == -1
    assert probability[0, 2] == 0


def test_a_nan_in_attention_is_not_lost_in_its_soft_cap() -> None:
    ids, model = torch.tensor([[3, 4, 5]]), families.build("gemma2")
    assert ModelRunner(model, "native").read(ids).isfinite().all()  # from now on the shape is known to be good
    with torch.no_grad():
        model.get_parameter("model.layers.0.self_attn.q_proj.weight")[0, 0] = NAN
    assert ModelRunner(model, "native").read(ids).isnan().all()


def test_error_codes_of_every_function_are_raised(runner: ModelRunner) -> None:
    native: Any = declare(library.load())
    number = torch.zeros(4)
    at = number.data_ptr()
    for name, arguments in {
        "sk_pack": (0, at, 1, -1, 1, at),
        "sk_quantize": (3, 0, at, 1, 1, -1, at),
        "sk_take": (None, at, 1, at),
        "sk_embed": (None, at, 1, at),
        "sk_norm": (None, at, 1, at),
        "sk_head": (None, None, at, 1, 1, None, at, 1),
        "sk_test": (None, None, at, 1, None, at, at, 1),
        "sk_largest": (at, 1, 2, 2, 3, at, 1),
        "sk_draw": (at, -1, 1, 1, at, at, at, at, at, 1, at),
        "sk_run": (None, None, None, 0, 0, None, at, 0, at, 0, 1),
        "sk_chain": (*[None] * 3, 0, 0, *[None] * 4, 0, *[None] * 2, 0, 0, *[None] * 2, 0, *[None] * 5, 0, 1),
    }.items():
        with pytest.raises(RuntimeError, match="buffer that is missing, or a size"):
            getattr(native, name)(*arguments)
    assert native.sk_packed_bytes(0, 1 << 62, 1 << 62) == -1


@pytest.mark.slow
def test_the_memory_of_a_long_prompt_is_given_back() -> None:
    before, grown, after = map(
        float,
        in_process(
            "import torch",
            "from skipstone.engines.model_runner import ModelRunner",
            "from tests.helpers import families",
            "def megabytes(): return int(open('/proc/self/statm').read().split()[1]) * 4096 / 2**20",
            "model = ModelRunner(families.build('llama'), 'native')",
            "few, many = (torch.zeros(1, n, model.config.hidden_size) for n in (1, 200_000))",
            "model.greedy_tokens(few); before = megabytes()",
            "model.greedy_tokens(many); grown = megabytes()",
            "for _ in range(600): model.greedy_tokens(few)",
            "print(before, grown, megabytes())",
        ).split(),
    )
    logits = 200_000 * 97 * 4 / 2**20
    assert grown - before > 0.9 * logits
    assert after - before < 0.3 * logits


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
@pytest.mark.parametrize("engine", ["eager", "native"])
def test_the_next_call_works_in_a_fork_and_in_its_parent(engine: str) -> None:
    said = in_process(
        "import os, signal, torch, skipstone",
        "from tests.helpers import families",
        "torch.set_num_threads(2)",
        "model = families.build('llama')",
        "ids = torch.arange(3, 60)[None]",
        f"def text(): return skipstone.generate(model, ids, max_new_tokens=8, engine={engine!r}).new_tokens",
        "torch.randn(4_000_000).exp()  # on several threads, which no fork has",
        "first = text()",
        "child = os.fork()",
        "if not child:",
        "    signal.alarm(100)",
        "    torch.randn(4_000_000).exp()",
        "    os._exit(0 if text() == first else 1)",
        "print(text() == first, os.waitpid(child, 0)[1])",
    )
    assert said == "True 0"


def test_what_a_caller_has_set_of_its_floating_point_unit_changes_nothing_and_stays(runner: ModelRunner) -> None:
    tiny = torch.full((1, 3, runner.config.hidden_size), 1e-39)
    before = runner.normed(tiny)
    assert torch.set_flush_denormal(True)
    try:
        flushed = runner.normed(tiny)
        assert float(torch.tensor([1e-39]) * 1) == 0.0, "the caller's own setting is still there"
    finally:
        torch.set_flush_denormal(False)
    assert flushed.equal(before)
    assert before.abs().max() > 0
