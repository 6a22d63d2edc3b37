"""The native engine is as near the exact result as torch's float32, and a mistake in what it reads of a model is noticed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.native.weights import NativeWeights
from skipstone.models.passes import Pass, SkipSet
from tests.helpers import families
from tests.helpers.native import DTYPES, FAMILIES, NATIVE_ONLY, assert_near, native, references, scenario, shaped, text
from tests.helpers.pairwise import round_robin, slow_except

pytestmark = NATIVE_ONLY


@round_robin(name=FAMILIES, seed=range(3))
def test_errors_are_those_of_float32(name: str, seed: int) -> None:
    model, vocab = shaped(name, seed)
    model = model.to(DTYPES[seed])
    assert_near(scenario(native(model, 1 + seed % 2), vocab, seed), *references(model, vocab, seed))


@pytest.mark.parametrize("name", slow_except(FAMILIES[::2], FAMILIES))
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


@pytest.mark.parametrize("name", ["gemma", "gemma2", "gemma3_text"])
def test_embeddings_are_scaled_as_gemma_scales_them(name: str) -> None:
    model = families.build(name, hidden_size=40).to(torch.bfloat16)
    tokens, positions = torch.tensor([[5]]), torch.tensor([[0]])
    embedding: Any = model.get_input_embeddings()
    expected = embedding.weight[5].float() * embedding.embed_scale.float()
    assert torch.equal(native(model).embed(tokens, positions)[0, 0], expected)


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
    wanted = references(model, 97, 4)
    assert_near(scenario(native(model), 97, 4), *wanted)
    plant(monkeypatch)
    wrong = native(copy.deepcopy(model))
    with pytest.raises(AssertionError, match="is off by"):
        assert_near(scenario(wrong, 97, 4), *wanted)
