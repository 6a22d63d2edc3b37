"""What the native engine cannot do it says in a sentence, and a pass that does not fit writes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.engine import why_not
from skipstone.engines.native.weights import RECIPES
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.passes import Pass, Tree
from tests.helpers import families
from tests.helpers.native import NATIVE_ONLY, assert_same_bits, chain, native, text

pytestmark = NATIVE_ONLY


GUARD = 512


def guarded(runner: ModelRunner) -> tuple[KVCache, list[Tensor]]:
    """A store for 20 tokens (its buffers inside larger ones), and those larger ones."""
    store, whole = KVCache(2, runner.depth, 20), []
    store.reserve(20)
    shape = (2, 2, store.capacity + 1, 16)
    size = torch.Size(shape).numel()
    for buffers in (store.keys, store.values):
        for index in range(runner.depth):
            whole.append(torch.full((size + 2 * GUARD,), 7.0))
            buffers[index] = whole[-1][GUARD : GUARD + size].view(shape)
    return store, whole


def bad_pass(positions: list[int] | None = None, slots: list[int] | None = None, **more: Any) -> Pass:
    here = torch.arange(3)[None]
    given = [here if one is None else torch.tensor([one]) for one in (positions, slots)]
    return Pass(*given, None, more.pop("rows", slice(0, 1)), more.pop("extent", 3), **more)


def bare_tree(base: int, positions: list[int], sees: bool = True) -> dict[str, Any]:
    seen = torch.eye(3, dtype=torch.bool)[None] & sees
    return {"tree": Tree(torch.tensor([base]), seen, torch.tensor([positions]))}


REFUSED: dict[str, tuple[Callable[[], Pass], str]] = {
    "a slot beyond": (lambda: bad_pass(slots=[0, 1, 4000]), "a slot that the KV store does not have"),
    "the trash": (lambda: bad_pass(slots=[0, 1, 20]), "a slot that the KV store does not have"),
    "a negative slot": (lambda: bad_pass(slots=[0, -1, 2]), "a slot that the KV store does not have"),
    "one slot for two tokens": (lambda: bad_pass(slots=[0, 1, 1]), "a slot .* or one slot for two tokens"),
    "one slot for two tokens apart": (lambda: bad_pass(slots=[2, 1, 2]), "a slot .* or one slot for two tokens"),
    "a row beyond": (lambda: bad_pass(rows=slice(2, 3)), "a slot that the KV store does not have"),
    "an extent beyond": (lambda: bad_pass(extent=22), "a slot that the KV store does not have"),
    "a negative position": (lambda: bad_pass(positions=[0, -1, 2]), "a position that the model does not have"),
    "a position not stored": (lambda: bad_pass(positions=[0, 1, 3]), "a position that the model does not have"),
    "a position beyond the rotary table": (
        lambda: bad_pass(positions=[0, 1, 5000], **bare_tree(0, [0, 1, 5000])),
        "a position that the model does not have",
    ),
    "a tree without sight": (lambda: bad_pass(**bare_tree(0, [0, 1, 2], False)), "a tree in which a token sees nothing"),
    "a tree before the store": (lambda: bad_pass(**bare_tree(-4, [0, 1, 2])), "a tree in which a token sees nothing"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_bad_pass_is_refused_and_writes_nothing(what: str) -> None:
    make, sentence = REFUSED[what]
    runner = native(families.cached("llama"))
    store, whole = guarded(runner)
    hidden = torch.ones(1, 3, 32)
    with pytest.raises(RuntimeError, match=f"the native engine was asked for {sentence}"):
        runner.run(hidden, make(), store, range(4))
    assert all(bool((one == 7.0).all()) for one in whole), "a refused pass wrote to the store"
    assert bool((hidden == 1).all())
    runner.run(hidden, bad_pass(), store, range(4))  # and the same engine goes on, inside its buffers
    for one in whole:
        assert bool((one[:GUARD] == 7.0).all() & (one[-GUARD:] == 7.0).all())
    assert not bool((whole[0] == 7.0).all())


def test_an_extent_that_holds_the_trash_is_refused() -> None:
    runner = native(families.cached("llama"))
    store, _ = guarded(runner)
    with pytest.raises(RuntimeError, match="the native engine was asked for"):
        runner.run(torch.ones(1, 3, 32), bad_pass([0, 1, store.capacity], extent=store.capacity + 1), store, range(4))


@pytest.mark.parametrize("token", [-1, 97, 2**40])
def test_an_unknown_token_is_refused(token: int) -> None:
    with pytest.raises(RuntimeError, match="a token id that the model has no embedding for"):
        native(families.cached("llama")).embed(torch.tensor([[3, token]]), torch.tensor([[0, 1]]))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 5)])
def test_an_unknown_layer_is_refused(start: int, stop: int) -> None:
    runner = native(families.cached("llama"))
    store, whole = guarded(runner)
    with pytest.raises(RuntimeError, match="a layer that the model does not have"):
        runner.run(torch.ones(1, 3, 32), bad_pass(), store, range(start, stop))
    assert all(bool((one == 7.0).all()) for one in whole)


def whole_pass(**changed: Any) -> Pass:
    """Three tokens of a row as a tree, all tensors as they should be but for those that are named."""
    tree = {
        "base": torch.tensor([0]),
        "ancestors": torch.eye(3, dtype=torch.bool)[None],
        "column_positions": torch.arange(3)[None],
    }
    given = {"positions": torch.arange(3)[None], "slots": torch.arange(3)[None], "valid": None, "seen": None, **tree, **changed}
    tree = Tree(given["base"], given["ancestors"], given["column_positions"], given["seen"])
    return Pass(given["positions"], given["slots"], given["valid"], slice(0, 1), 3, None, tree)


MISFITS: dict[str, Tensor] = {
    "slots": torch.arange(2)[None],
    "positions": torch.arange(3, dtype=torch.int32)[None],
    "valid": torch.ones(1, 2, dtype=torch.bool),
    "base": torch.zeros(0, dtype=torch.int64),
    "ancestors": torch.ones(1, 2, 3, dtype=torch.bool),
    "column_positions": torch.arange(2, dtype=torch.int32)[None],
    "seen": torch.tensor(3),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_tensor_that_is_too_short_or_of_another_kind_is_refused(name: str) -> None:
    runner = native(families.cached("llama"))
    store, whole = guarded(runner)
    runner.run(torch.ones(1, 3, 32), whole_pass(), store, range(0))
    with pytest.raises(ValueError, match=r"the native engine wants \w+ \[[\d, ]*\] in \w+ on the CPU, found \["):
        runner.run(torch.ones(1, 3, 32), whole_pass(**{name: MISFITS[name]}), store, range(4))
    assert all(bool((one == 7.0).all()) for one in whole), "a refused pass wrote to the store"


STATES = [
    torch.ones(1, 2, 32),
    torch.ones(1, 3, 31),
    torch.ones(1, 3, 32, dtype=torch.bfloat16),
    torch.ones(1, 3, 32, device="meta"),
    torch.ones(3, 32),
]


@pytest.mark.parametrize("hidden", STATES, ids=lambda one: f"{list(one.shape)} {one.dtype} {one.device}")
def test_states_that_do_not_fit_are_refused(hidden: Tensor) -> None:
    runner = native(families.cached("llama"))
    store, _ = guarded(runner)
    sentence = r"the native engine wants hidden \[1, 3, 32\] in float32 on the CPU, found \["
    with pytest.raises(ValueError, match=sentence):
        runner.run(hidden, bad_pass(), store, range(4))
    if hidden.shape[-1] != 32 or hidden.dtype != torch.float32 or hidden.is_meta:
        for read in (runner.normed, runner.project, runner.engine.greedy_tokens):
            with pytest.raises(ValueError, match=r"the native engine wants (hidden|normed)"):
                read(hidden)


def test_a_store_of_another_engine_or_model_is_refused() -> None:
    model = families.build("gemma", head_dim=12)  # the native engine keeps whole vectors
    store, positions = KVCache(1, 4, 20), torch.arange(3)[None]
    store.reserve(20)
    eager = ModelRunner(model, "eager")
    eager.run(eager.embed(positions, positions), bad_pass(), store, range(4))
    with pytest.raises(ValueError, match=r"wants keys and values .* in float32 on the CPU, found"):
        native(model).run(torch.ones(1, 3, 32), bad_pass(), store, range(4))
    store = KVCache(1, 4, 20)
    store.reserve(20)
    native(families.cached("llama")).run(torch.ones(1, 3, 32), bad_pass(), store, range(4))
    with pytest.raises(ValueError, match=r"wants keys and values"):
        native(families.build("llama", num_key_value_heads=4)).run(torch.ones(1, 3, 32), bad_pass(), store, range(4))


def test_ids_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match=r"wants tokens .* in int64 on the CPU, found .* in int32"):
        native(families.cached("llama")).embed(torch.ones(1, 2, dtype=torch.int32), torch.tensor([[0, 1]]))


def test_no_memory_is_an_error() -> None:
    """The library takes room for what it normalises before it reads the states, which are not there."""
    engine: Any = native(families.cached("llama")).engine
    states, best = torch.ones(1, 32), torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="more memory or threads than there are"):
        engine._library.sk_head(engine._model, None, states.data_ptr(), 2**36, True, states.data_ptr(), best.data_ptr(), 1)


class OtherLinear(nn.Linear):
    pass


def _hook(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)


def _pre_hook(model: Any) -> None:
    model.model.norm.register_forward_pre_hook(lambda *_: None)


def _subclass(model: Any) -> None:
    model.model.layers[2].mlp.up_proj.__class__ = OtherLinear


def _own_forward(model: Any) -> None:
    module = model.model.layers[0].self_attn
    module.forward = lambda *given, **more: type(module).forward(module, *given, **more)


def _activation(model: Any) -> None:
    model.model.layers[1].mlp.act_fn = nn.ReLU()


ODD: dict[str, tuple[Callable[[Any], None], str]] = {
    "hook": (_hook, "model.layers.1.mlp has hooks or a forward of its own, which only transformers' modules run"),
    "pre-hook": (_pre_hook, "model.norm has hooks or a forward of its own, which only transformers' modules run"),
    "subclass": (
        _subclass,
        "model.layers.2.mlp.up_proj is a OtherLinear of tests.engines.test_native_refusals, and the native engine knows only "
        "the modules that transformers builds this family of",
    ),
    "own forward": (
        _own_forward,
        "model.layers.0.self_attn has hooks or a forward of its own, which only transformers' modules run",
    ),
    "activation": (_activation, "the native engine does not know the activation ReLU"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_cannot_be_run_is_said_in_a_sentence(what: str) -> None:
    change, sentence = ODD[what]
    model = families.build("llama")
    assert why_not(model, DecoderModel(model)) is None
    change(model)
    assert why_not(model, DecoderModel(model)) == sentence
    with pytest.raises(ValueError, match="engine='native' cannot run this model"):
        ModelRunner(model, "native")


@pytest.mark.parametrize("name", [name for name in families.NAMES if name not in RECIPES])
def test_an_unknown_family_is_said(name: str) -> None:
    model = families.cached(name)
    assert f"does not know the family {model.config.model_type} (it knows llama" in str(why_not(model, DecoderModel(model)))


def test_the_eager_engines_patches_are_no_forward_of_their_own() -> None:
    model = families.build("llama")
    expected = chain(native(model), text(9), 1)
    chain(ModelRunner(model, "eager"), text(9), 9)
    assert why_not(model, DecoderModel(model)) is None
    assert_same_bits(chain(native(model), text(9), 1), expected)
