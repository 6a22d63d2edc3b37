"""What needs a GPU; skipped without one. Everything else of the suite runs on the CPU."""

import warnings

import pytest
import torch
from transformers import PreTrainedModel

import skipstone
from skipstone.core import generation
from skipstone.core.options import prepare
from tests import families

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS = [
    skipstone.Autoregressive(),
    skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4),
    skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4, confidence_threshold=0.2),
    skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=4, rejection_sample_method="coupled"),
]


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return families.build(request.param).to("cuda")


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_greedy_text_on_the_gpu_is_that_of_generate(model: PreTrainedModel, method: skipstone.Method) -> None:
    ids = torch.randint(1, 97, (1, 12), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    expected = model.generate(ids, max_new_tokens=24, do_sample=False)
    found = skipstone.generate(model, ids, method, max_new_tokens=24, do_sample=False)
    assert torch.equal(found.sequences, expected)


@pytest.mark.parametrize("sampling", [{"do_sample": False}, {"do_sample": True, "temperature": 0.8, "top_p": 0.9}], ids=str)
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_decode_step_synchronises_once(model: PreTrainedModel, method: skipstone.Method, sampling: dict) -> None:
    ids = torch.randint(1, 97, (2, 12), device="cuda", generator=torch.Generator("cuda").manual_seed(1))
    call = prepare(model, ids, seed=3, max_new_tokens=40, **sampling)
    decoder, _ = generation.start(method, call)
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
