"""What needs a GPU; skipped without one. Everything else of the suite runs on the CPU."""

import warnings
from dataclasses import fields, replace

import pytest
import torch
from transformers import PreTrainedModel

import skipstone
from skipstone.hf import generation
from skipstone.hf.call import prepare
from tests.helpers import families

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
    skipstone.PromptLookup(),
    skipstone.Jacobi(5),
    skipstone.Lookahead(3, 3, 3),
    skipstone.Speculative(None, 4),
    skipstone.Speculative(None, 4, "confidence", 0.2, rejection_sample_method="coupled"),
    skipstone.AdaSD(None, 4, relaxed=False),
]


def paired(method: skipstone.Method, device: str = "cuda") -> skipstone.Method:
    """With a draft model on a device, where the method wants one."""
    second = any(field.name == "draft_model" for field in fields(method))
    return replace(method, draft_model=families.build("llama").to(device)) if second else method  # type: ignore[call-arg]


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return families.build(request.param).to("cuda")


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_greedy_text_on_the_gpu_is_that_of_generate(model: PreTrainedModel, method: skipstone.Method) -> None:
    ids = torch.randint(1, 97, (1, 12), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    found = skipstone.generate(model, ids, paired(method), max_new_tokens=24, do_sample=False)
    assert torch.equal(found.sequences, expected)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_decode_step_synchronises_once(model: PreTrainedModel, method: skipstone.Method, sampling: dict) -> None:
    ids = torch.randint(1, 97, (2, 12), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    call = prepare(model, ids, seed=3, max_new_tokens=40, **sampling)
    decoder, _ = generation.admitted(paired(method), call)
    for _ in range(3):  # prefill and warm-up
        decoder.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decoder.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    synchronised = [str(w.message) for w in caught if "synchroniz" in str(w.message)]
    assert len(synchronised) == 1, synchronised


@pytest.mark.parametrize("method", METHODS, ids=repr)
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


@pytest.mark.parametrize("method", METHODS[1:], ids=repr)
def test_sampled_rows_of_different_settings_end_where_they_end(model: PreTrainedModel, method: skipstone.Method) -> None:
    session = paired(method).start(skipstone.LayeredModel(model), 3, 64)
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
