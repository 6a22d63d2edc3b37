"""Attention of the native engine over long texts: the same bits in passes of any width, the numbers of float64; and keys and
values in bfloat16, which are rounded once and no more."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.passes import Pass
from tests.helpers import families
from tests.helpers.native import (
    NATIVE_ONLY,
    Computed,
    Exact,
    assert_near,
    assert_same_bits,
    chain,
    grow,
    levels,
    native,
    of_level,
    path_to,
    ragged,
    stored,
    text,
    tree_pass,
)
from tests.helpers.pairwise import round_robin

pytestmark = NATIVE_ONLY

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


@round_robin(name=SHAPES, kv_dtype=["float32", "bfloat16"])
def test_prompts_in_passes_of_any_width(name: str, kv_dtype: str) -> None:
    model, ids = shape(name), text(LENGTH)
    expected = chain(native(model, 1, kv_dtype), ids, 1)
    for width in (2, 3, 5, 8, 11, 16, 17, 31, 63, 64, 65, 130, LENGTH):
        assert_same_bits(chain(native(model, 1 + width % 3, kv_dtype), ids, width), expected)
    for threads, width in ((1, 7), (2, 40), (3, 130)):
        assert_same_bits(ragged(native(model, threads, kv_dtype), ids, width), expected)


@round_robin(name=SHAPES, kv_dtype=["float32", "bfloat16"])
def test_instruction_sets_agree_on_long_texts(name: str, kv_dtype: str) -> None:
    found = levels()
    if len(found) < 2:
        pytest.skip("this CPU has one level only")
    model, ids, computed = shape(name), text(LENGTH), []
    for level in found:
        runner = of_level(model, level)
        runner.kv_dtype = native(model, 1, kv_dtype).kv_dtype
        computed.append(chain(runner, ids, 50))
    for one in computed[1:]:
        assert_same_bits(one, computed[0])


def start(runner: ModelRunner, ids: Tensor, room: int) -> KVCache:
    """A store that holds a text and has room for more tokens."""
    store, slots = KVCache(1, runner.depth, len(ids) + room, runner.kv_dtype), torch.arange(len(ids))[None]
    store.reserve(len(ids) + room)
    at = Pass(slots, slots, None, slice(0, 1), len(ids), 0)
    runner.run(runner.embed(ids[None], slots), at, store, range(runner.depth))
    return store


@round_robin(name=SHAPES, kv_dtype=["float32", "bfloat16"])
def test_trees_of_64_nodes_behind_300_tokens(name: str, kv_dtype: str) -> None:
    base, nodes = 300, 64
    runner, parents = native(shape(name), 2, kv_dtype), grow(nodes, seed=len(name))
    prompt, drawn = text(base), text(nodes + 1, seed=6)
    store, parts = start(runner, prompt, nodes + 1), []
    for columns in (slice(0, 2), slice(2, 40), slice(40, nodes + 1)):
        at = tree_pass(parents, base, columns)
        hidden = runner.run(runner.embed(drawn[None, columns], at.positions), at, store, range(runner.depth))
        parts.append(runner.project(runner.normed(hidden))[0])
    logits = torch.cat(parts)
    for node in (nodes - 1, nodes // 2):
        columns = [0, *(one + 1 for one in path_to(parents[0].tolist(), node))]
        whole: Computed = chain(runner, torch.cat([prompt, drawn[columns]]), 150)
        expected = whole[0][base:], whole[1][:, :, base:]
        assert_same_bits((logits[columns], stored(store, 0, [base + column for column in columns])), expected)


@pytest.mark.parametrize("name", SHAPES)
def test_long_prompts_are_as_exact_as_in_float32(name: str) -> None:
    model, ids = shape(name), text(LENGTH)
    rough = chain(ModelRunner(copy.deepcopy(model), "eager"), ids, LENGTH)[0]
    with Exact():
        exact = chain(ModelRunner(copy.deepcopy(model).double(), "eager"), ids, LENGTH)[0]
    assert_near([chain(native(model, 2), ids, LENGTH)[0]], [rough], [exact])


@pytest.mark.parametrize("name", SHAPES)
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
    runner = native(model, 1, "bfloat16")
    kept = start(runner, text(2), 0).values[0]
    assert kept is not None
    assert kept[0, 0, 1, :4].tolist() == [1.0, 1 + 2**-6, -1.0, 1 + 2**-7]
    torch.testing.assert_close(kept[0, 0, 1, : len(tied)], tied.bfloat16(), rtol=0, atol=0, equal_nan=True)
