"""Native bits of a token depend on its text alone, and errors are those of torch's float32."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.engine import NativeEngine
from skipstone.engines.native.weights import NativeWeights
from skipstone.models.passes import Pass, SkipSet
from tests.helpers import families
from tests.helpers.native import (
    DTYPES,
    FAMILIES,
    NATIVE_ONLY,
    Exact,
    assert_branches_are_chains,
    assert_near,
    assert_same_bits,
    chain,
    grow,
    levels,
    native,
    of_level,
    ragged,
    references,
    scenario,
    shaped,
    text,
)
from tests.helpers.pairwise import round_robin, slow_except

pytestmark = NATIVE_ONLY


ARITHMETIC = [
    *(pytest.param((dtype, None), id=str(dtype)) for dtype in DTYPES),
    pytest.param((torch.bfloat16, "float32"), id="torch.bfloat16, inputs in float32"),
]


@round_robin(name=FAMILIES, arithmetic=ARITHMETIC)
def test_a_branch_of_a_tree_has_the_bits_of_the_same_chain(name: str, arithmetic: tuple[torch.dtype, str | None]) -> None:
    dtype, compute_dtype = arithmetic
    runner = native(families.build(name).to(dtype), 2, compute_dtype=compute_dtype)
    parents = grow(30, seed=len(name))
    for split in (31, 9):
        splits = [slice(first, min(first + split, 31)) for first in range(0, 31, split)]
        assert_branches_are_chains(runner, parents, 12, splits, 1)


def test_one_wrong_bit_in_wide_passes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = families.build("llama"), text(20)
    expected, right = chain(native(model), ids, 1), NativeEngine.run

    def wrong(self: Any, hidden: Tensor, *given: Any) -> Tensor:
        out = right(self, hidden, *given)
        return out if out.shape[1] < 5 else out.nextafter(out + 1)

    monkeypatch.setattr(NativeEngine, "run", wrong)
    assert_same_bits(chain(native(model), ids, 4), expected)
    with pytest.raises(AssertionError, match="logits differ by"):
        assert_same_bits(chain(native(model), ids, 5), expected)


LENGTH = 133  # tokens: more than two chunks of slots
SHAPES = {  # family, query heads, kv heads, head size, more
    "group 1, head 20": ("llama", 3, 3, 20, {}),
    "group 2, head 64": ("llama", 4, 2, 64, {}),
    "group 3, head 8, window 21": ("mistral", 6, 2, 8, {"sliding_window": 21}),
    "group 4, head 72": ("qwen3", 4, 1, 72, {}),
    "group 7, head 12, window 70": ("mistral", 7, 1, 12, {"sliding_window": 70}),
    "soft-caps, group 3, windows 5": ("gemma2", 6, 2, 24, {"sliding_window": 5}),
}


def shape(name: str) -> Any:
    family, heads, kv_heads, size, more = SHAPES[name]
    settings = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": size, "hidden_size": 12 * heads}
    return families.build(family, layers=2, **settings, **more)


WIDTHS = (2, 3, 5, 8, 11, 16, 17, 31, 63, 64, 65, 130, LENGTH)


def assert_bits_depend_on_the_text_alone(
    model: Any, ids: Tensor, kv_dtype: str | None = None, compute_dtype: str | None = None
) -> None:
    options = kv_dtype, compute_dtype
    expected = chain(native(model, 1, *options), ids, 1)
    for width in WIDTHS[: 11 if len(ids) < 65 else None]:
        assert_same_bits(chain(native(model, 1 + width % 3, *options), ids, width), expected)
    for threads, width in ((1, 4), (2, 7), (3, 19), (5, 10), *([(3, 130)] if len(ids) > 64 else [])):
        assert_same_bits(ragged(native(model, threads, *options), ids, width), expected)
    for level in levels():
        for width in (3, 50):
            runner = of_level(model, level, compute_dtype)
            runner.kv_dtype = native(model, 1, *options).kv_dtype
            assert_same_bits(chain(runner, ids, width), expected)


@round_robin(name=FAMILIES, arithmetic=ARITHMETIC)
def test_a_token_has_the_same_bits_in_every_pass_and_on_every_level(
    name: str, arithmetic: tuple[torch.dtype, str | None]
) -> None:
    dtype, compute_dtype = arithmetic
    assert_bits_depend_on_the_text_alone(families.build(name).to(dtype), text(), compute_dtype=compute_dtype)


@round_robin(name=slow_except([*SHAPES][1::2], SHAPES), kv_dtype=["float32", "bfloat16"])
def test_a_token_has_the_same_bits_in_long_texts(name: str, kv_dtype: str) -> None:
    assert_bits_depend_on_the_text_alone(shape(name), text(LENGTH), kv_dtype)


@round_robin(name=SHAPES, kv_dtype=["float32", "bfloat16"])
def test_trees_of_64_nodes_behind_300_tokens(name: str, kv_dtype: str) -> None:
    splits = slice(0, 2), slice(2, 40), slice(40, 65)
    assert_branches_are_chains(native(shape(name), 2, kv_dtype), grow(64, seed=len(name)), 300, splits, 150)


@pytest.mark.parametrize("name", slow_except([*SHAPES][::2], SHAPES))
def test_long_prompts_are_as_exact_as_in_float32(name: str) -> None:
    model, ids = shape(name), text(LENGTH)
    rough = chain(ModelRunner(copy.deepcopy(model), "eager"), ids, LENGTH)[0]
    with Exact():
        exact = chain(ModelRunner(copy.deepcopy(model).double(), "eager"), ids, LENGTH)[0]
    assert_near([chain(native(model, 2), ids, LENGTH)[0]], [rough], [exact])


@pytest.mark.parametrize("name", slow_except([*SHAPES][1::2], SHAPES))
def test_keys_and_values_are_rounded_to_the_nearest_bfloat16(name: str) -> None:
    model, ids = shape(name), text(LENGTH)
    exact, rounded = chain(native(model), ids, LENGTH), chain(native(model, 1, "bfloat16"), ids, LENGTH)
    assert rounded[1].dtype == torch.bfloat16
    for first in (0, 2):  # keys and values of layer 0, into which nothing rounded has gone yet
        assert torch.equal(rounded[1][first], exact[1][first].bfloat16())
    expected = chain(ModelRunner(copy.deepcopy(model), "eager", kv_dtype="bfloat16"), ids, LENGTH)
    effect, error = (exact[0] - rounded[0]).abs().max(), (expected[0] - rounded[0]).abs().max()
    assert effect > 0
    assert error < 0.25 * effect, "the two engines do not round alike"  # a number near a tie may be rounded either way


def test_ties_go_to_even_numbers_and_a_nan_stays_one() -> None:
    model = families.build("qwen2", layers=1)
    ModelRunner(model)  # its family is derived from numbers, before there is a nan
    values: Any = model.model.layers[0].self_attn.v_proj
    tied = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 1 + 2**-8 + 2**-20, 3.4e38, 0.0, float("nan"), 1e-40])
    values.weight.zero_()
    values.bias.copy_(tied.repeat(len(values.bias) // len(tied)))
    found = chain(native(model, 1, "bfloat16"), text(2), 2)[1][1, 0, 1]
    assert found[:4].tolist() == [1.0, 1 + 2**-6, -1.0, 1 + 2**-7]
    torch.testing.assert_close(found[: len(tied)], tied.bfloat16(), rtol=0, atol=0, equal_nan=True)


@round_robin(name=FAMILIES, seed=range(3))
@pytest.mark.slow
def test_errors_are_those_of_float32(name: str, seed: int) -> None:
    model, vocab = shaped(name, seed)
    model = model.to(DTYPES[seed])
    exact_inputs = native(model, 1 + seed % 2, compute_dtype="float32")
    assert_near(scenario(exact_inputs, vocab, seed), *references(model, vocab, seed))


@pytest.mark.parametrize("name", slow_except(FAMILIES[::6], FAMILIES))
def test_skipped_sublayers_and_layer_ranges(name: str) -> None:
    model, vocab = shaped(name, 3)
    plain = scenario(native(model), vocab, 3)
    for attention, mlp in (({1}, set()), ({0, 2}, {2, 3}), ({0, 1, 2, 3}, {0, 1, 2, 3})):
        skip = SkipSet(frozenset(attention), frozenset(mlp))
        rough, exact = references(model, vocab, 3, skip)
        found = scenario(native(model), vocab, 3, skip)
        assert_near(found, rough, exact)
        if skip.attention != skip.mlp:
            assert (plain[-1] - found[-1]).abs().max() > 0.01, "the skipped sublayers did nothing anyway"
        for step in (2, 3, 4):  # the same layers in other ranges: the same bits
            assert torch.equal(scenario(native(model), vocab, 3, skip, step)[-1], found[-1])


def test_skipped_attention_writes_nothing() -> None:
    runner = native(families.build("llama"))
    store, positions = KVCache(1, 4, 20), torch.arange(6)[None]
    store.reserve(20)
    for buffers in (store.keys, store.values):
        buffers[:] = [torch.full((1, 2, store.capacity + 1, 16), 7.0) for _ in range(4)]
    at = Pass(positions, positions, None, slice(0, 1), 6, 0)
    hidden = runner.embed(text(6)[None], positions)
    runner.run(hidden, at, store, range(4), SkipSet(frozenset({1, 3}), frozenset({0})))
    for index in range(4):
        for buffer in (store.keys[index], store.values[index]):
            assert buffer is not None
            assert bool((buffer == 7.0).all()) == (index in (1, 3))
            assert bool((buffer[:, :, 6:] == 7.0).all()), "a slot of no token was written"


def _without_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeWeights, "_norm", lambda self, module: self._floats(module.weight.detach()))


def _layer_with(change: Callable[[Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    made = NativeWeights._layer

    def layer(self: Any, *given: Any) -> Any:
        packed = made(self, *given)
        change(packed)
        return packed

    return lambda monkeypatch: monkeypatch.setattr(NativeWeights, "_layer", layer)


def _swap(first: str, second: str) -> Callable[[Any], None]:
    def swap(layer: Any) -> None:
        copies = [type(getattr(layer, name)).from_buffer_copy(getattr(layer, name)) for name in (first, second)]
        setattr(layer, first, copies[1])
        setattr(layer, second, copies[0])

    return swap


PLANTED: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], None]]] = {
    "norm offset omitted": ("gemma", _without_offset),
    "q and k swapped": ("llama", _layer_with(_swap("q", "k"))),
    "gate and up swapped": ("phi3", _layer_with(_swap("gate", "up"))),
    "q bias omitted": ("qwen2", _layer_with(lambda layer: setattr(layer.q, "bias", None))),
    "window one too large": ("mistral", _layer_with(lambda layer: setattr(layer, "window", layer.window + 1))),
    "residual multiplier omitted": ("granite", _layer_with(lambda layer: setattr(layer, "residual", 1.0))),
    "rotary phases everywhere": ("smollm3", _layer_with(lambda layer: setattr(layer, "rotary", 0))),
    "no soft-cap": ("gemma2", _layer_with(lambda layer: setattr(layer, "softcap", 0.0))),
}


@pytest.mark.parametrize("mistake", PLANTED)
def test_a_planted_mistake_is_noticed(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, plant = PLANTED[mistake]
    model = families.build(name, num_key_value_heads=4)
    expected = references(model, 97, 4)
    assert_near(scenario(native(model), 97, 4), *expected)
    plant(monkeypatch)
    wrong = native(copy.deepcopy(model))
    with pytest.raises(AssertionError, match="is off by"):
        assert_near(scenario(wrong, 97, 4), *expected)
