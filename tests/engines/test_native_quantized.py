"""Quantised weights: their codes, the products computed with them, and refusals."""

from itertools import product as product_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import skipstone
from skipstone.engines.engine import QUANTIZED as CHOICES
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.weights import QUANTIZED, TYPES
from tests.helpers import families
from tests.helpers.native import FAMILIES, NATIVE_ONLY, assert_same_bits, chain, text
from tests.helpers.pairwise import round_robin
from tests.helpers.quantized import Packed, assert_near, drawn, grouped, inputs_of, libraries, rounded

pytestmark = NATIVE_ONLY
KINDS = list(QUANTIZED)
SHAPES = [(16, 32), (97, 64), (33, 40), (112, 300), (5, 7)]  # outputs, inputs


def coded(kind: str, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [o, groups, 32], scales and minima [o, groups, 1] in float64, by the formulas of csrc/quantized.h."""
    groups = grouped(weights)
    if kind == "int8":
        scale = (np.abs(groups).max(2, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
        minimum, least, most = np.zeros_like(scale), -127, 127
    else:
        low, high = (np.take_along_axis(groups, one[..., None], 2) for one in (groups.argmin(2), groups.argmax(2)))
        minimum = low.astype(np.float16).astype(np.float32)  # of 0 and -0 the first counts
        scale = ((high - minimum) / np.float32(15)).astype(np.float16).astype(np.float32)
        least, most = 0, 15
    with np.errstate(divide="ignore"):
        inverse = np.where(scale > 0, np.float32(1) / scale, np.float32(0))
    codes = np.rint(np.clip((groups - minimum) * inverse, least, most)).astype(np.int64)
    return codes, scale.astype(np.float64), minimum.astype(np.float64)


def dequantized(kind: str, weights: np.ndarray) -> np.ndarray:
    codes, scale, minimum = coded(kind, weights)
    return (codes * scale + minimum).reshape(len(weights), -1)[:, : weights.shape[1]]


def product(kind: str, x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[n, o] float64: whole numbers summed by group, then groups."""
    codes, scale, minimum = coded(kind, weights)
    groups = grouped(x)
    top = np.abs(groups).max(2, keepdims=True)
    with np.errstate(divide="ignore"):
        inverse = np.where(top > 0, np.float32(127) / top, np.float32(0))
    inputs = np.rint(groups * inverse).astype(np.int64)  # [n, groups, 32]
    steps = (top / np.float32(127)).astype(np.float64)[..., 0]  # [n, groups]
    whole = np.einsum("ngk,ogk->nog", inputs, codes)
    parts = scale[..., 0] * whole + minimum[..., 0] * inputs.sum(2)[:, None]  # [n, o, groups]
    return (parts * steps[:, None]).sum(2)


def largest(outputs: int, inputs: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights and inputs with the largest codes, of one sign or of both: sums must not overflow."""
    signs = np.where(np.arange(inputs) % 2, np.float32(127), np.float32(-127))
    weights = np.stack([np.abs(signs), signs] * outputs)[:outputs]
    return weights, np.stack([np.abs(signs), -np.abs(signs), signs])


def written(kind: str, weights: np.ndarray) -> np.ndarray:
    """The panels of weights, by the layout of csrc/quantized.h."""
    outputs, pad = len(weights), -len(weights) % 16
    codes, scale, minimum = (np.pad(one, ((0, pad), (0, 0), (0, 0))) for one in coded(kind, weights))
    panels, groups = [], codes.shape[1]
    for first in range(0, outputs, 16):
        used = np.arange(first, first + 16) < outputs
        own, halves = codes[first : first + 16], [scale[first : first + 16, :, 0].T]
        if kind == "int4":
            halves.append(minimum[first : first + 16, :, 0].T)
            eights = own.reshape(16, groups, 4, 2, 4)
            numbers = eights[:, :, :, 0] | eights[:, :, :, 1] << 4  # [16, groups, 4, 4]
        else:
            numbers = (own + 128).reshape(16, groups, 8, 4) * used[:, None, None, None]
        head = np.stack(halves, 1).astype(np.float16).tobytes()
        panels.append(head.ljust(-(-len(head) // 64) * 64, b"\0") + numbers.transpose(1, 2, 0, 3).astype(np.uint8).tobytes())
    return np.frombuffer(b"".join(panels), dtype=np.uint8)


def extreme(outputs: int, inputs: int, dtype: torch.dtype) -> Tensor:
    """Weights with zeros of both signs, denormal numbers, the largest ones, and scales that are denormal."""
    largest = 65519 if dtype == torch.float32 else 65280  # float16 rounds 65520 to infinity, and bfloat16 has fewer digits
    dice = np.random.default_rng(inputs)
    zeros = np.where(dice.random((2, inputs)) < 0.5, 0.0, -0.0)
    tops = np.array([[float(torch.finfo(dtype).smallest_normal) / 4], [1e-6], [largest]])
    rows = [zeros, dice.uniform(-1, 1, (3, inputs)) * tops, np.sign(dice.normal(size=(1, inputs))) * largest]
    return torch.from_numpy(np.concatenate([*rows, drawn(outputs, inputs, seed=inputs)])[:outputs]).to(dtype)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_panels_are_those_of_the_written_layout(dtype: torch.dtype, kind: str, tmp_path: Path) -> None:
    for outputs, inputs in [*SHAPES, (64, 128), (47, 97)]:
        stored = extreme(outputs, inputs + 3, dtype)
        expected = written(kind, stored[:, :inputs].float().numpy())
        path = tmp_path / "weights"
        path.write_bytes(b"header" + stored.view(torch.uint8).numpy().tobytes())
        with path.open("rb") as file:
            for engine, (number, place) in product_of(libraries(), [(-1, stored.data_ptr()), (file.fileno(), 6)]):
                panels = np.full(engine.sk_packed_bytes(QUANTIZED[kind], outputs, inputs), 85, dtype=np.uint8)
                split = outputs // 32 * 16  # outputs of a first call
                for first, count, threads in ((0, split, 1), (split, outputs - split, 2)):
                    at = place + first * stored.stride(0) * dtype.itemsize
                    to = panels.ctypes.data + engine.sk_packed_bytes(QUANTIZED[kind], first, inputs)
                    engine.sk_quantize(QUANTIZED[kind], TYPES[dtype], number, at, inputs + 3, count, inputs, to, threads)
                assert np.array_equal(panels, expected)


@pytest.mark.parametrize("target", TYPES, ids=str)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_panels_that_are_not_quantised_have_every_weight_in_its_place(dtype: torch.dtype, target: torch.dtype) -> None:
    if target not in (dtype, torch.float32):
        return
    for outputs, inputs in [*SHAPES, (64, 128), (47, 97)]:
        stored, step = extreme(outputs, inputs + 3, dtype), 2 if target == torch.bfloat16 else 1
        padded = torch.zeros(-(-outputs // 16) * 16, -(-inputs // step) * step, dtype=target)
        padded[:outputs, :inputs] = stored[:, :inputs]
        expected = padded.view(-1, 16, padded.shape[1] // step, step).transpose(1, 2).contiguous().view(torch.uint8).flatten()
        for engine in libraries():
            panels = torch.full((engine.sk_packed_bytes(TYPES[target], outputs, inputs),), 85, dtype=torch.uint8)
            shape = inputs + 3, outputs, inputs, panels.data_ptr()
            engine.sk_pack(TYPES[target], TYPES[dtype], -1, stored.data_ptr(), *shape, 2)
            assert torch.equal(panels, expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_weights_beyond_the_format_are_refused_wherever_they_are(dtype: torch.dtype, kind: str) -> None:
    outputs, inputs = 33, 70
    beyond = [-torch.inf, torch.inf, torch.nan, *([1e7, -1e7] if dtype != torch.float16 else [])]
    for value, (output, given) in product_of(beyond, [(0, 0), (15, 31), (16, 64), (32, 69), (32, 3)]):
        stored = torch.zeros(outputs, inputs, dtype=dtype)
        stored[output, given] = value
        for engine in libraries():
            panels = np.empty(engine.sk_packed_bytes(QUANTIZED[kind], outputs, inputs), dtype=np.uint8)
            shape = stored.data_ptr(), inputs, outputs, inputs, panels.ctypes.data
            with pytest.raises(ValueError, match="finite"):
                engine.sk_quantize(QUANTIZED[kind], TYPES[dtype], -1, *shape, 2)


@round_robin(shape=SHAPES, kind=KINDS)
def test_the_product_is_that_of_the_written_formula(kind: str, shape: tuple[int, int]) -> None:
    for weights, x in ((drawn(*shape), inputs_of(9, shape[1])), largest(*shape)):
        for engine in libraries():
            assert_near(Packed(engine, QUANTIZED[kind], weights).multiplied(x), product(kind, x, weights))


@pytest.mark.parametrize("kind", KINDS)
def test_panels_and_products_have_the_same_bits_on_every_level_beside_any_rows(kind: str) -> None:
    weights, x = drawn(210, 168), inputs_of(64, 168)
    first = Packed(libraries()[0], QUANTIZED[kind], weights)
    expected = np.concatenate([first.multiplied(x[i : i + 1]) for i in range(len(x))])
    for engine in libraries():
        packed = Packed(engine, QUANTIZED[kind], weights)
        assert np.array_equal(packed.panels, first.panels)
        assert np.array_equal(packed.rows(), first.rows())
        for count in range(1, 65):
            assert np.array_equal(packed.multiplied(x[:count], 1 + count % 3), expected[:count])


@pytest.mark.parametrize("kind", KINDS)
def test_planted_mistakes_are_noticed(kind: str) -> None:
    weights, x = drawn(97, 96), inputs_of(9, 96)
    expected, right = product(kind, x, weights), Packed(libraries()[0], QUANTIZED[kind], weights)
    assert_near(right.multiplied(x), expected)
    per_group = 16 * {"int8": 1, "int4": 2}[kind]
    codes_at = -(-3 * per_group * 2 // 64) * 64  # bytes of a panel's scales, aligned
    wrong = right.panels[codes_at : codes_at + 64].copy()
    for planted in (wrong ^ 1, np.roll(wrong, 1), np.roll(wrong, 4)):  # codes that are off by one, and in each other's places
        right.panels[codes_at : codes_at + 64] = planted
        with pytest.raises(AssertionError):
            assert_near(right.multiplied(x), expected)
    right.panels[codes_at : codes_at + 64] = wrong
    scales = right.panels.view(np.uint16)[: 2 * per_group]
    scales[:] = np.roll(scales, per_group)  # each group with the other's scale
    with pytest.raises(AssertionError):
        assert_near(right.multiplied(x), expected)


def quantised(model: Any, kind: str, threads: int = 1) -> ModelRunner:
    runner = ModelRunner(model, None, kind)
    runner.engine.threads = threads  # pyright: ignore[reportAttributeAccessIssue]
    return runner


@round_robin(name=FAMILIES, kind=KINDS)
def test_a_token_has_the_same_bits_in_every_pass(name: str, kind: str) -> None:
    model, ids = families.build(name), text()
    expected = chain(quantised(model, kind), ids, 1)
    for width, threads in ((2, 1), (5, 2), (8, 3), (13, 1), (64, 2)):
        assert_same_bits(chain(quantised(model, kind, threads), ids, width), expected)
    runner = quantised(model, kind)
    assert torch.equal(runner.project(runner.read(ids[None]))[0], expected[0])


@round_robin(name=["llama", "qwen2", "gemma3_text", "phi3"], kind=KINDS)
def test_models_compute_what_transformers_does_with_quantised_weights(name: str, kind: str) -> None:
    model, ids = families.build(name), text()
    found, _ = chain(quantised(model, kind), ids, 8)
    plain = model(ids[None]).logits[0]
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            own = "int8" if module is model.lm_head else kind  # pyright: ignore
            module.weight.data.copy_(torch.from_numpy(dequantized(own, module.weight.numpy())))
            module.register_forward_pre_hook(rounded)
    expected = model(ids[None]).logits[0]
    error, quantisation = (float((one - expected).norm() / expected.norm()) for one in (found, plain))
    assert quantisation > 0.01, "nothing was quantised"
    assert error < 0.3 * quantisation, f"{error:.3g} where quantisation makes {quantisation:.3g}"


def test_the_embedding_is_quantised_where_it_is_the_head_and_stored_elsewhere() -> None:
    ids, positions = torch.arange(97)[None], torch.arange(97)[None] % 64
    for tied in (True, False):
        model: Any = families.build("llama", tie_word_embeddings=tied)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        stored = ModelRunner(model, "native").embed(ids, positions)
        found = quantised(model, "int8").embed(ids, positions)
        expected = torch.from_numpy(dequantized("int8", stored[0].numpy()).astype(np.float32)) if tied else stored[0]
        assert torch.allclose(found[0], expected, rtol=1e-6, atol=1e-8)
        assert torch.equal(found, stored) != tied


@round_robin(method=["layerskip exit_layer=2", "swift", "prompt_lookup"], kind=KINDS)
def test_greedy_texts_of_methods_are_those_of_plain_decoding(kind: str, method: str) -> None:
    model, ids = families.build("llama"), families.prompts(1)[0][None]
    skipstone.enable(model, "autoregressive", quantize=kind)
    options: dict[str, Any] = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    plain = skipstone.generate(model, ids, "autoregressive", **options)
    found = skipstone.generate(model, ids, method, **options)
    assert (plain.engine, plain.quantize, found.quantize) == ("native", kind, kind)
    assert found.stats is not None
    assert found.stats.drafted > 0
    assert found.new_tokens == plain.new_tokens


def test_bad_values_and_engines_without_quantised_weights_are_refused() -> None:
    model, other = families.build("llama"), families.build("gpt2")
    unknown = "quantize must be one of none, int8, int4, found 'int3'"
    eager = r"quantize='int8', asked for now or .* needs the native engine, found engine='eager'"
    refused = "quantize='int4' needs the native engine, which cannot run this model: the native"
    attempts: list[tuple[Any, str]] = [
        (lambda: skipstone.load(quantize="int3"), unknown),
        (lambda: skipstone.enable(model, "autoregressive", quantize="int3"), unknown),
        (lambda: ModelRunner(model, "eager", "int8"), eager),
        (lambda: skipstone.load(engine="eager", quantize="int8"), eager),
        (lambda: skipstone.enable(other, "autoregressive", quantize="int4"), refused),
    ]
    for attempt, words in attempts:
        with pytest.raises(ValueError, match=words):
            attempt()
    assert ModelRunner(other).engine.name == "eager", "what failed is not remembered"
    for kind in KINDS:
        for bad in (np.nan, np.inf, 1e9):
            model.model.layers[1].mlp.down_proj.weight[3, 5] = bad  # pyright: ignore
            with pytest.raises(ValueError, match="quantize needs finite weights"):
                ModelRunner(model, None, kind)
    assert ("none", *KINDS) == CHOICES
