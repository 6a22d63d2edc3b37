"""What needs a GPU; skipped without one. Everything else of the suite runs on the CPU."""

import warnings
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import skipstone
from skipstone.engines.eager import linear
from skipstone.hf import api
from skipstone.hf.generate_call import prepare_call
from tests.helpers import families
from tests.helpers.conformance import eagle3_head
from tests.helpers.support import assert_same_texts, decode

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS = [
    skipstone.Autoregressive(),
    skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4),
    skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4, confidence_threshold=0.2),
    skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4, rejection_sample_method="coupled"),
    skipstone.SelfSpeculative((1,), (2,), num_speculative_tokens=4),
    skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4, draft_vocabulary=60),
    skipstone.Swift(0.5, 4, context_window=6, draft_vocabulary=60),
    skipstone.Speculative(None, 4, draft_vocabulary=60),
    skipstone.Swift(0.5, 4, context_window=6),
    skipstone.Eagle3(num_speculative_tokens=4),
    skipstone.PromptLookup(),
    skipstone.Jacobi(5),
    skipstone.Lookahead(3, 3, 3),
    skipstone.Recycle(),
    skipstone.Recycle(num_speculative_tokens=20, num_candidates=4),
    skipstone.Auto((skipstone.PromptLookup(), skipstone.Recycle())),
    skipstone.Speculative(None, 4),
    skipstone.Speculative(None, 4, "confidence", 0.2, rejection_sample_method="coupled"),
    skipstone.AdaSD(None, 4, relaxed=False),
]

WAITING = [
    skipstone.AdaDecode("original", confidence_threshold=0.3),
    skipstone.Auto((skipstone.PromptLookup(), skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4))),
]
"""Methods that wait for the device more often than once a step: at every test of an exit, and to look at what drafts said."""


def paired(method: skipstone.Method, device: str = "cuda") -> skipstone.Method:
    """With a draft model on a device or with a head, where the method wants one."""
    if isinstance(method, skipstone.Eagle3):
        return replace(method, head=eagle3_head("llama"))
    second = any(field.name == "draft_model" for field in fields(method))
    return replace(method, draft_model=families.build("llama").to(device)) if second else method  # type: ignore[call-arg]


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return families.build(request.param).to("cuda")


@pytest.mark.parametrize("method", [*METHODS, *WAITING], ids=repr)
def test_greedy_text_on_the_gpu_is_that_of_generate(model: PreTrainedModel, method: skipstone.Method) -> None:
    ids = torch.randint(1, 97, (1, 12), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    found = skipstone.generate(model, ids, paired(method), max_new_tokens=24, do_sample=False)
    assert torch.equal(found.sequences, expected)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_decode_step_synchronises_once(model: PreTrainedModel, method: skipstone.Method, sampling: dict) -> None:
    ids = torch.randint(1, 97, (2, 12), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    call = prepare_call(model, ids, None, 3, {"max_new_tokens": 120, **sampling})
    decoder = api.admitted(paired(method), call)
    for _ in range(3):  # prefill and warm-up
        decoder.step()
    for _ in range(8 if isinstance(method, skipstone.Auto) else 1):  # it times plain decoding first, then tries this and that
        assert len(found := waits(decoder)) == 1, found


def waits(decoder: skipstone.Decoder) -> list[str]:
    """Where a step waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]


def test_auto_waits_for_what_layers_drafted_and_for_a_shadow(model: PreTrainedModel) -> None:
    ids = torch.randint(1, 97, (2, 12), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    decoder = api.admitted(WAITING[1], prepare_call(model, ids, None, None, {"max_new_tokens": 200, "do_sample": False}))
    decoder.step()
    found: list[list[str]] = []
    while decoder.busy and len(found) < 60:
        found.append(waits(decoder))
    assert all(1 <= len(one) <= 4 for one in found), found  # the verdict, confidences, and two of a shadow
    assert any(len(one) == 1 for one in found)


@pytest.mark.parametrize("method", [*METHODS, *WAITING], ids=repr)
def test_ragged_rows_with_processors_from_ids_on_the_cpu(model: PreTrainedModel, method: skipstone.Method) -> None:
    """Ids, masks and prompts may lie on the CPU; processors that transformers builds for a row must not."""
    ids = torch.randint(1, 97, (3, 14), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :5], mask[2, :11] = 0, 0
    options = {"do_sample": False, "eos_token_id": 5, "min_new_tokens": 6, "repetition_penalty": 1.2, "max_new_tokens": 20}
    options |= {"encoder_repetition_penalty": 1.1}
    found = skipstone.generate(model, ids, paired(method), attention_mask=mask, **options)
    plain = skipstone.generate(model, ids, "autoregressive", attention_mask=mask, **options)
    assert found.new_tokens == plain.new_tokens
    assert all(len(tokens) >= 6 for tokens in found.new_tokens)


@pytest.mark.parametrize("method", [*METHODS[1:], *WAITING], ids=repr)
def test_sampled_rows_of_different_settings_end_where_they_end(model: PreTrainedModel, method: skipstone.Method) -> None:
    session = paired(method).start(skipstone.ModelRunner(model), 3, 64)
    decoder = skipstone.Decoder(session)
    for row, temperature in enumerate((0.0, 0.7, 1.1)):
        prompt = torch.arange(1, 9 + 3 * row)
        sampling = skipstone.Sampling(temperature, top_p=0.9 if row == 1 else 1.0, seed=row)
        decoder.admit(row, skipstone.Request(prompt, 10 + 4 * row, frozenset({3}), sampling))
    texts: list[list[int]] = [[], [], []]
    while decoder.busy:
        for text, tokens in zip(texts, decoder.step().tokens, strict=True):
            text += tokens
    assert all(3 not in text[:-1] and (len(text) == 10 + 4 * row or text[-1] == 3) for row, text in enumerate(texts))


@pytest.mark.parametrize("method", METHODS[-3:], ids=repr)
def test_the_draft_model_may_lie_on_the_cpu(model: PreTrainedModel, method: skipstone.Method) -> None:
    ids = torch.randint(1, 97, (2, 12), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    found = skipstone.generate(model, ids, paired(method, "cpu"), max_new_tokens=24, do_sample=False)
    assert found.new_tokens == skipstone.generate(model, ids, "autoregressive", max_new_tokens=24, do_sample=False).new_tokens


COMPILED = [
    "autoregressive",
    "layerskip exit_layer=2 num_speculative_tokens=4",
    "recycle num_speculative_tokens=5 num_candidates=3",
    "auto",
]


@pytest.mark.parametrize("rows", [1, 3])
def test_the_compiled_engine_writes_what_the_eager_engine_writes(rows: int) -> None:
    """With Inductor and CUDA graphs, again and again: every request has a store of its own, somewhere else."""
    from torch._dynamo.utils import counters

    counters.clear()
    model = families.build("llama").to("cuda")
    prompts, options = families.prompts(rows), {"do_sample": False, "max_new_tokens": 40}
    for text in COMPILED:
        expected = decode(model, prompts, text, engine="eager", **options)
        graphs: list[int] = []
        prepared: list[int] = []
        for _ in range(3):
            found: Any = decode(model, prompts, text, engine="compiled", **options)
            assert found.engine == "compiled"
            assert expected.new_tokens is not None
            assert_same_texts(model, prompts, expected.new_tokens, found, options)
            graphs.append(recorded(model))
            prepared.append(skipstone.ModelRunner(model, "compiled").engine.preparations)
        assert graphs[0] > 0
        assert graphs[1] == graphs[2] or text == "auto", "what was met by earlier requests is not recorded again"
        assert prepared[0] > graphs[0], "what is recorded has run before"
        assert prepared[1] == prepared[2] or text == "auto"
    assert not counters["graph_break"]


def test_the_compiled_engine_transposes_the_products_of_float32_alone() -> None:
    """Of its own copies: the model's modules stay."""
    for dtype, kind in ((torch.float32, linear.TransposedLinear), (torch.bfloat16, torch.nn.Linear)):
        model = families.build("llama").to("cuda", dtype)
        engine: Any = skipstone.ModelRunner(model, "compiled").engine
        found = {type(part) for twin in engine._copies for part in twin.modules() if isinstance(part, torch.nn.Linear)}
        assert found == {kind}
        assert not any(isinstance(part, linear.TransposedLinear) for part in model.modules())


WAIT_THEMSELVES = ["qwen3_moe", "gpt_oss", "deepseek_v3"]
"""Families of which no CUDA graph could be recorded: qwen3_moe copies from the host within a layer; why the other two could not
was not read."""


@pytest.mark.parametrize("name", ["gemma2", "gpt2", *WAIT_THEMSELVES])
def test_other_families_are_recorded_or_run_without_cuda_graphs(name: str) -> None:
    """Windows, position tables, sinks of attention, latent keys and values, experts."""
    model, prompts, options = families.build(name).to("cuda"), families.prompts(2), {"do_sample": False, "max_new_tokens": 24}
    for text in ("autoregressive", "layerskip exit_layer=2 num_speculative_tokens=3"):
        expected = decode(model, prompts, text, engine="eager", **options)
        for _ in range(2):
            found = decode(model, prompts, text, engine="compiled", **options)
            assert expected.new_tokens is not None
            assert_same_texts(model, prompts, expected.new_tokens, found, options)
    engine: Any = skipstone.ModelRunner(model, "compiled").engine
    assert bool(recorded(model)) != ("without CUDA graphs" in engine.detail)
    assert recorded(model) or name in WAIT_THEMSELVES, engine.detail


def test_a_step_of_the_compiled_engine_synchronises_once() -> None:
    runner = skipstone.ModelRunner(families.build("llama").to("cuda"), "compiled")
    for turn in range(3):
        decoder = skipstone.Decoder(skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4).start(runner, 1, 64))
        decoder.admit(0, skipstone.Request(torch.arange(1, 9), 24))
        decoder.step()
        while decoder.busy:
            assert len(found := waits(decoder)) == 1 or turn < 2, found


def test_weights_that_have_moved_are_read_where_they_are() -> None:
    model: Any = families.build("llama").to("cuda")
    options: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
    weight = model.get_decoder().layers[1].mlp.up_proj.weight
    for _ in range(2):
        before = decode(model, families.prompts(1), "autoregressive", engine="compiled", **options).new_tokens
        weight.data = weight.data * -2
        after = decode(model, families.prompts(1), "autoregressive", engine="compiled", **options).new_tokens
        assert after == decode(model, families.prompts(1), "autoregressive", engine="eager", **options).new_tokens
        assert after != before


def recorded(model: PreTrainedModel) -> int:
    """How many CUDA graphs the compiled engine has."""
    engine: Any = skipstone.ModelRunner(model, "compiled").engine
    return sum(one is not None for one in engine._recorded.values())
