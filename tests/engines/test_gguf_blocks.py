"""GGUF files that the native engine computes as they are stored: logits, bits, texts, and types without kernels."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import skipstone
from skipstone.engines.mapped_loading import load_for_decoding
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.weights import BLOCKS, STORED
from skipstone.models.mapped_model import MappedModel
from tests.helpers import families
from tests.helpers.gguf_files import BLOCK_MODELS, write_blocks
from tests.helpers.native import NATIVE_ONLY, assert_same_bits, chain, text
from tests.helpers.pairwise import round_robin, slow_except
from tests.helpers.quantized import rounded

pytestmark = NATIVE_ONLY
METHODS = ["layerskip exit_layer=2", "prompt_lookup", "speculative", "auto"]


def loaded(path: Path) -> MappedModel:
    model, _ = load_for_decoding(path)
    assert isinstance(model, MappedModel)
    return model


@round_robin(kind=BLOCKS, name=BLOCK_MODELS)
def test_logits_are_those_of_the_weights_of_the_file(kind: str, name: str, tmp_path: Path) -> None:
    path, model = write_blocks(tmp_path, name, kind, layers=1)  # later ones multiply the few inputs that round the other way
    found, _ = chain(ModelRunner(loaded(path)), ids := text(), 8)
    unrounded = model(ids[None]).logits[0]
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)
    expected = model(ids[None]).logits[0]
    error, rounding = (float((one - expected).norm() / expected.norm()) for one in (found, unrounded))
    assert rounding > 1e-3
    assert error < 0.2 * rounding, f"{error:.3g} where rounding makes {rounding:.3g}"


@round_robin(kind=STORED, name=BLOCK_MODELS)
def test_a_token_has_the_same_bits_in_every_pass(kind: str, name: str, tmp_path: Path) -> None:
    runner, ids = ModelRunner(loaded(write_blocks(tmp_path, name, kind).path)), text()
    expected = chain(runner, ids, 1)
    for width, threads in ((2, 1), (8, 2), (64, 1), (64, 2)):
        runner.engine.threads = threads  # pyright: ignore[reportAttributeAccessIssue]
        assert_same_bits(chain(runner, ids, width), expected)


@round_robin(method=METHODS, kind=STORED)
def test_greedy_texts_of_methods_are_those_of_plain_decoding(method: str, kind: str, tmp_path: Path) -> None:
    model, ids = loaded(write_blocks(tmp_path, "llama", kind).path), families.prompts(1)[0][None]
    if method == "speculative":
        (tmp_path / "draft").mkdir()
        method += f" draft_model={write_blocks(tmp_path / 'draft', 'llama', 'Q4_0').path}"
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    plain = skipstone.generate(model, ids, "autoregressive", **options)
    found = skipstone.generate(model, ids, method, **options)
    assert found.stats is not None
    assert found.stats.drafted > 0 or method == "auto", "auto drafts where that pays"
    assert found.new_tokens == plain.new_tokens


@pytest.mark.parametrize("kind", slow_except(["Q5_1", "IQ4_NL"], ["Q5_1", "IQ4_NL", "Q2_K"]))
def test_types_without_kernels_are_computed_in_float32(kind: str, tmp_path: Path) -> None:
    path, model = write_blocks(tmp_path, "llama", kind)
    with pytest.warns(RuntimeWarning, match=rf"has matrices in .*{kind}.*, which are computed in float32"):
        found, _ = chain(ModelRunner(loaded(path)), ids := text(), 8)
    expected = model(ids[None]).logits[0]
    assert torch.allclose(found, expected, atol=1e-4 * float(expected.abs().max()))


def test_a_code_beyond_the_panels_is_refused(tmp_path: Path) -> None:
    path = write_blocks(tmp_path, "llama", "Q8_0").path
    tensor = next(one for one in gguf.GGUFReader(path, "r+").tensors if one.name == "blk.1.ffn_up.weight")
    tensor.data[5, 2] = 128  # -128
    tensor.data.base.flush()
    with pytest.raises(ValueError, match="Q8_0 codes from -127 to 127"):
        load_for_decoding(path)


def test_another_dtype_is_unpacked_by_transformers(tmp_path: Path) -> None:
    model, _ = load_for_decoding(write_blocks(tmp_path, "llama", "Q8_0").path, dtype=torch.bfloat16)
    assert not isinstance(model, MappedModel)
    assert model.dtype == torch.bfloat16
