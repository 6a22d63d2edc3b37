"""What is promised of the native engine: a token's bits depend on its text alone, they are as near the exact ones as torch's
float32, and what it cannot do it says in a sentence.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from skipstone.models.engines.native import build, library
from skipstone.models.engines.native.engine import NativeEngine, why_not
from skipstone.models.engines.native.weights import RECIPES, Weights
from skipstone.models.facts import Facts
from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass, SkipSet, Tree, ancestors
from tests.helpers import families

pytestmark = pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
FAMILIES = list(RECIPES)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LENGTH = 64  # tokens of a text: eight windows
ALLOWED = 8  # times the error that torch's own float32 has


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def text(length: int = LENGTH, seed: int = 5, vocab: int = 97) -> Tensor:
    return torch.randint(1, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def native(model: Any, threads: int = 1) -> LayeredModel:
    layered = LayeredModel(model, "native")
    layered.engine.threads = threads  # pyright: ignore[reportAttributeAccessIssue]
    return layered


def of_level(model: Any, level: str) -> LayeredModel:
    """The model on an engine of its own, from the library of a level."""
    found, before = library.find(build.HERE, library.features(), level), library.load
    assert found.library is not None, found.missing
    layered = LayeredModel(model, "eager")
    try:
        library.load = lambda: found.library  # pyright: ignore[reportAttributeAccessIssue]
        layered.engine = NativeEngine(model, Facts(model))
    finally:
        library.load = before
    layered.engine.threads, layered.dtype = 1, torch.float32
    assert level in layered.engine.detail
    return layered


Computed = tuple[Tensor, Tensor]
"""Logits [T, V], and keys and values of all layers [2 layers, kv heads, T, padded head size] of one text."""


def stored(store: KVStore, row: int, slots: Any) -> Tensor:
    return torch.stack([buffer[row][:, slots] for buffer in (*store.keys, *store.values)])  # pyright: ignore


def chain(layered: LayeredModel, ids: Tensor, width: int) -> Computed:
    """A text in passes of `width` tokens."""
    store, parts = KVStore(1, layered.depth, len(ids)), []
    store.reserve(len(ids))
    for start in range(0, len(ids), width):
        stop = min(start + width, len(ids))
        positions = torch.arange(start, stop)[None]
        at = Pass(positions, positions, None, slice(0, 1), stop, start)
        hidden = layered.run(layered.embed(ids[None, start:stop], positions), at, store, range(layered.depth))
        parts.append(layered.project(layered.normed(hidden))[0])
    return torch.cat(parts), stored(store, 0, slice(0, len(ids)))


def ragged(layered: LayeredModel, ids: Tensor, width: int) -> Computed:
    """The same, as row 2 of a store in which the rows beside it are at other positions and hold fewer tokens."""
    dice, store, parts, at_position = random.Random(width), KVStore(4, layered.depth, len(ids)), [], [0, 0, 0]
    store.reserve(len(ids))
    others = [text(seed=7), ids, text(seed=8)]
    while at_position[1] < len(ids):
        counts = [min(dice.randint(0, width), len(ids) - at_position[0]), min(width, len(ids) - at_position[1])]
        counts.append(min(dice.randint(0, width), len(ids) - at_position[2]))
        shift = dice.randint(0, 2)  # invalid columns in front, whose tokens, positions and slots mean nothing
        n = width + shift
        valid = torch.zeros(3, n, dtype=torch.bool)
        positions, slots, tokens = torch.full((3, n), 3), torch.full((3, n), 1), torch.zeros(3, n, dtype=torch.long)
        for row, count in enumerate(counts):
            span, start = slice(shift, shift + count), at_position[row]
            valid[row, span] = True
            positions[row, span] = slots[row, span] = torch.arange(start, start + count)
            tokens[row, span] = others[row][start : start + count]
            at_position[row] += count
        at = Pass(positions, slots, valid, slice(1, 4), max(at_position))
        before = layered.embed(tokens, positions)
        hidden = layered.run(before, at, store, range(layered.depth))
        assert torch.equal(hidden[~valid], before[~valid]), "an invalid entry was changed"
        parts.append(layered.project(layered.normed(hidden))[1][valid[1]])
    return torch.cat(parts), stored(store, 2, slice(0, len(ids)))


def same_bits(found: Computed, expected: Computed) -> None:
    for what, a, b in zip(("logits", "keys and values"), found, expected, strict=True):
        assert a.shape == b.shape
        assert bool(b.isfinite().all())
        assert b.std() > 0.01, "the reference is degenerate"
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), f"{what} differ by {(a - b).abs().max():.3g}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_has_the_same_bits_in_every_pass(name: str, dtype: torch.dtype) -> None:
    model, ids = families.build(name).to(dtype), text()
    expected = chain(native(model), ids, 1)
    for width in (2, 3, 5, 8, 13, 64):
        same_bits(chain(native(model), ids, width), expected)
    for threads in (2, 3):
        for width in (1, 5, 64):
            same_bits(chain(native(model, threads), ids, width), expected)
    for threads, width in ((1, 4), (2, 7), (1, 19)):
        same_bits(ragged(native(model, threads), ids, width), expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_instruction_sets_give_the_same_bits(name: str) -> None:
    levels = [level.name for level in build.levels() if level.features <= library.features()]
    levels = [level for level in levels if library.find(build.HERE, library.features(), level).library is not None]
    if len(levels) < 2:
        pytest.skip("this CPU has one level only")
    for dtype in DTYPES:
        model, ids = families.build(name).to(dtype), text(24)
        expected = chain(of_level(model, levels[0]), ids, 1)
        for level in levels:
            for width in (3, 24):
                same_bits(chain(of_level(model, level), ids, width), expected)


def grow(nodes: int, seed: int) -> Tensor:
    """parents [1, nodes] of a random tree that is deep enough to leave a window behind."""
    dice = random.Random(seed)
    return torch.tensor([[dice.randint(max(-1, i - 3), i - 1) for i in range(nodes)]])


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root's child down to a node."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def tree_pass(parents: Tensor, base: int, columns: slice, row: int = 0) -> Pass:
    """Columns of a tree whose root, column 0, lies in slot `base`."""
    width = parents.shape[1] + 1
    seen = ancestors(parents)
    positions = base + seen.sum(2) - 1
    slots = torch.arange(base, base + width)[None]
    tree = Tree(torch.tensor([base]), seen[:, columns], positions)
    stop = columns.stop if columns.stop is not None else width
    return Pass(positions[:, columns], slots[:, columns], None, slice(row, row + 1), base + stop, None, tree)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_branch_of_a_tree_has_the_bits_of_the_same_chain(name: str, dtype: torch.dtype) -> None:
    model, base, nodes = families.build(name).to(dtype), 12, 30
    layered, parents = native(model, 2), grow(nodes, seed=len(name))
    prompt, drawn = text(base), text(nodes + 1, seed=6)
    for split in (nodes + 1, 9):
        store = KVStore(1, layered.depth, base + nodes + 1)
        store.reserve(base + nodes + 1)
        start = torch.arange(base)[None]
        at = Pass(start, start, None, slice(0, 1), base, 0)
        layered.run(layered.embed(prompt[None], start), at, store, range(layered.depth))
        parts = []
        for first in range(0, nodes + 1, split):
            columns = slice(first, min(first + split, nodes + 1))
            at = tree_pass(parents, base, columns)
            hidden = layered.run(layered.embed(drawn[None, columns], at.positions), at, store, range(layered.depth))
            parts.append(layered.project(layered.normed(hidden))[0])
        logits, branches = torch.cat(parts), [path_to(parents[0].tolist(), node) for node in range(nodes)]
        deepest = max(branches, key=len)
        assert len(deepest) > families.WINDOW, "the tree is shallow"
        for path in [branches[-1], branches[nodes // 2], deepest]:
            columns = [0, *(node + 1 for node in path)]
            whole = chain(layered, torch.cat([prompt, drawn[columns]]), 1)
            expected = whole[0][base:], whole[1][:, :, base:]
            same_bits((logits[columns], stored(store, 0, [base + column for column in columns])), expected)


# ---- against float64


class Exact(TorchFunctionMode):
    """float64 wherever transformers' own code asks for float32 (norms, softmax, rotary phases)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        swap = lambda one: torch.float64 if one is torch.float32 else one  # noqa: E731
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(swap, args), **{key: swap(value) for key, value in (kwargs or {}).items()})


def scenario(layered: LayeredModel, vocab: int, seed: int, skip: SkipSet | None = None, step: int = 1) -> list[Tensor]:
    """States after every `step` layers, then logits, of ragged prompts and a tree on each: [valid entries, width]."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths, nodes = [dice.randint(1, 14) for _ in range(3)], 9
    width, found = max(lengths), []
    store = KVStore(3, layered.depth, width + nodes + 1)
    store.reserve(width + nodes + 1)
    valid = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    columns = torch.arange(width).repeat(3, 1)
    parents = torch.tensor([[dice.randint(max(-1, i - 3), i - 1) for i in range(nodes)] for _ in lengths])
    reach, base = ancestors(parents), torch.tensor(lengths)
    positions = base[:, None] + reach.sum(2) - 1
    tree = Tree(base, reach, positions)
    tree_slots = base[:, None] + torch.arange(nodes + 1)
    tree_valid = torch.rand(3, nodes + 1, generator=generator) < 0.9
    tree_valid[:, 0] = True
    for at in (
        Pass(columns, columns, valid, slice(0, 3), width),
        Pass(positions, tree_slots, tree_valid, slice(0, 3), int(tree_slots.max()) + 1, None, tree),
    ):
        assert at.valid is not None
        tokens = torch.randint(1, vocab, at.shape, generator=generator)
        hidden = layered.embed(tokens, at.positions)
        for first in range(0, layered.depth, step):
            before = hidden
            hidden = layered.run(before, at, store, range(first, min(first + step, layered.depth)), skip)
            if layered.engine.name == "native":
                assert torch.equal(hidden[~at.valid], before[~at.valid]), "an invalid entry was changed"
            found.append(hidden[at.valid])
        found.append(layered.project(layered.normed(hidden))[at.valid])
    return found


def references(model: Any, vocab: int, seed: int, skip: SkipSet | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """What torch computes in float32, and in float64, with the weights as they are stored."""
    copies = copy.deepcopy(model).float(), copy.deepcopy(model).double()
    rough = scenario(LayeredModel(copies[0], "eager"), vocab, seed, skip)
    with Exact():
        exact = scenario(LayeredModel(copies[1], "eager"), vocab, seed, skip)
    assert exact[0].dtype == torch.float64
    return rough, exact


def near(found: list[Tensor], rough: list[Tensor], exact: list[Tensor]) -> float:
    """Assert that no error is larger than ALLOWED times that of torch's float32. Returns the largest share."""
    worst = 0.0
    for place, (mine, theirs, right) in enumerate(zip(found, rough, exact, strict=True)):
        assert right.std() > 1e-3, "the reference is degenerate"
        own = max((theirs - right).abs().max().item(), 2**-24 * right.abs().max().item())
        error = (mine - right).abs().max().item()
        assert error <= ALLOWED * own, f"output {place} is off by {error:.3g}, torch's float32 by {own:.3g}"
        worst = max(worst, error / own)
    return worst


def shaped(name: str, seed: int, **more: Any) -> tuple[Any, int]:
    """A model of a family in a random shape, and its vocabulary."""
    dice = random.Random(f"{name} {seed}")
    vocab, heads = dice.choice([97, 113]), dice.choice([4, 6])
    wide = [24, 36, 48] if heads == 6 else [24, 36, 40, 48]  # transformers wants multiples of the heads
    settings: dict[str, Any] = {
        "hidden_size": dice.choice(wide),
        "head_dim": dice.choice([4, 8, 12, 20]),
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([1, 2, heads]),
        "intermediate_size": dice.choice([20, 40, 72]),
    }
    if families.slides(name):
        settings["sliding_window"] = dice.choice([2, 3, 8])
    return families.build(name, vocab=vocab, seed=seed, **{**settings, **more}), vocab


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_errors_are_those_of_float32(name: str, seed: int) -> None:
    model, vocab = shaped(name, seed)
    model = model.to(DTYPES[seed])
    near(scenario(native(model, 1 + seed % 2), vocab, seed), *references(model, vocab, seed))


@pytest.mark.parametrize("name", FAMILIES)
def test_skipped_sublayers_and_layer_ranges(name: str) -> None:
    model, vocab = shaped(name, 3)
    plain = scenario(native(model), vocab, 3)
    for attention, mlp in (({1}, set()), ({0, 2}, {2, 3}), ({0, 1, 2, 3}, {0, 1, 2, 3})):
        skip = SkipSet(frozenset(attention), frozenset(mlp))
        rough, exact = references(model, vocab, 3, skip)
        found = scenario(native(model), vocab, 3, skip)
        near(found, rough, exact)
        if skip.attention != skip.mlp:
            assert (plain[-1] - found[-1]).abs().max() > 0.01, "the skipped sublayers did nothing anyway"
        for step in (2, 3, 4):  # the same layers in other ranges: the same bits
            assert torch.equal(scenario(native(model), vocab, 3, skip, step)[-1], found[-1])


def test_skipped_attention_writes_nothing() -> None:
    layered = native(families.build("llama"))
    store, positions = KVStore(1, 4, 20), torch.arange(6)[None]
    store.reserve(20)
    for buffers in (store.keys, store.values):
        buffers[:] = [torch.full((1, 2, store.capacity + 1, 16), 7.0) for _ in range(4)]
    at = Pass(positions, positions, None, slice(0, 1), 6, 0)
    hidden = layered.embed(text(6)[None], positions)
    layered.run(hidden, at, store, range(4), SkipSet(frozenset({1, 3}), frozenset({0})))
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


# ---- what is refused

GUARD = 512


def guarded(layered: LayeredModel) -> tuple[KVStore, list[Tensor]]:
    """A store for 20 tokens (its buffers inside larger ones), and those larger ones."""
    store, whole = KVStore(2, layered.depth, 20), []
    store.reserve(20)
    shape = (2, 2, store.capacity + 1, 16)
    size = torch.Size(shape).numel()
    for buffers in (store.keys, store.values):
        for index in range(layered.depth):
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
    layered = native(families.cached("llama"))
    store, whole = guarded(layered)
    hidden = torch.ones(1, 3, 32)
    with pytest.raises(RuntimeError, match=f"the native engine was asked for {sentence}"):
        layered.run(hidden, make(), store, range(4))
    assert all(bool((one == 7.0).all()) for one in whole), "a refused pass wrote to the store"
    assert bool((hidden == 1).all())
    layered.run(hidden, bad_pass(), store, range(4))  # and the same engine goes on, inside its buffers
    for one in whole:
        assert bool((one[:GUARD] == 7.0).all() & (one[-GUARD:] == 7.0).all())
    assert not bool((whole[0] == 7.0).all())


def test_an_extent_that_holds_the_trash_is_refused() -> None:
    layered = native(families.cached("llama"))
    store, _ = guarded(layered)
    with pytest.raises(RuntimeError, match="the native engine was asked for"):
        layered.run(torch.ones(1, 3, 32), bad_pass([0, 1, store.capacity], extent=store.capacity + 1), store, range(4))


@pytest.mark.parametrize("token", [-1, 97, 2**40])
def test_an_unknown_token_is_refused(token: int) -> None:
    with pytest.raises(RuntimeError, match="a token id that the model has no embedding for"):
        native(families.cached("llama")).embed(torch.tensor([[3, token]]), torch.tensor([[0, 1]]))


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 5)])
def test_an_unknown_layer_is_refused(start: int, stop: int) -> None:
    layered = native(families.cached("llama"))
    store, whole = guarded(layered)
    with pytest.raises(RuntimeError, match="a layer that the model does not have"):
        layered.run(torch.ones(1, 3, 32), bad_pass(), store, range(start, stop))
    assert all(bool((one == 7.0).all()) for one in whole)


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
    model.config.hidden_act = "relu"


ODD: dict[str, tuple[Callable[[Any], None], str]] = {
    "hook": (_hook, "model.layers.1.mlp has hooks or a forward of its own, which only transformers' modules run"),
    "pre-hook": (_pre_hook, "model.norm has hooks or a forward of its own, which only transformers' modules run"),
    "subclass": (
        _subclass,
        "model.layers.2.mlp.up_proj is a OtherLinear of tests.models.test_native, and the native engine knows torch's "
        "and transformers' modules only",
    ),
    "own forward": (
        _own_forward,
        "model.layers.0.self_attn has hooks or a forward of its own, which only transformers' modules run",
    ),
    "activation": (_activation, "the native engine does not know the activation relu"),
}


@pytest.mark.parametrize("what", ODD)
def test_what_cannot_be_run_is_said_in_a_sentence(what: str) -> None:
    change, sentence = ODD[what]
    model = families.build("llama")
    assert why_not(model, Facts(model)) is None
    change(model)
    assert why_not(model, Facts(model)) == sentence
    with pytest.raises(ValueError, match="engine='native' cannot run this model"):
        LayeredModel(model, "native")


@pytest.mark.parametrize("name", [name for name in families.NAMES if name not in RECIPES])
def test_an_unknown_family_is_said(name: str) -> None:
    model = families.cached(name)
    assert f"does not know the family {model.config.model_type} (it knows llama" in str(why_not(model, Facts(model)))


def test_the_eager_engines_patches_are_no_forward_of_their_own() -> None:
    model = families.build("llama")
    expected = chain(native(model), text(9), 1)
    chain(LayeredModel(model, "eager"), text(9), 9)
    assert why_not(model, Facts(model)) is None
    same_bits(chain(native(model), text(9), 1), expected)


def test_changed_weights_are_noticed() -> None:
    model: Any = families.build("qwen2")
    engine: Any = native(model).engine
    assert engine.holds()
    model.model.layers[1].self_attn.q_proj.bias.add_(1)
    assert not engine.holds()
    engine = NativeEngine(model, Facts(model))
    assert engine.holds()
    _hook(model)
    assert not engine.holds()


def test_a_model_changed_in_place_gets_a_new_engine() -> None:
    model: Any = families.build("llama")
    before = chain(native(model), text(9), 9)
    model.model.layers[1].mlp.down_proj.weight.mul_(-1)
    assert not torch.equal(chain(native(model), text(9), 9)[0], before[0])


# ---- mistakes that these tests would notice


def _without_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Weights, "_norm", lambda self, module: self._floats(module.weight.detach()))


def _layer_with(change: Callable[[Any], None]) -> Callable[[pytest.MonkeyPatch], None]:
    made = Weights._layer

    def layer(self: Any, *given: Any) -> Any:
        packed = made(self, *given)
        change(packed)
        return packed

    return lambda monkeypatch: monkeypatch.setattr(Weights, "_layer", layer)


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
    near(scenario(native(model), 97, 4), *wanted)
    plant(monkeypatch)
    wrong = native(copy.deepcopy(model))
    with pytest.raises(AssertionError, match="is off by"):
        near(scenario(wrong, 97, 4), *wanted)


def test_one_wrong_bit_in_wide_passes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = families.build("llama"), text(20)
    expected, right = chain(native(model), ids, 1), NativeEngine.run

    def wrong(self: Any, hidden: Tensor, *given: Any) -> Tensor:
        out = right(self, hidden, *given)
        return out if out.shape[1] < 5 else out.nextafter(out + 1)

    monkeypatch.setattr(NativeEngine, "run", wrong)
    same_bits(chain(native(model), ids, 4), expected)
    with pytest.raises(AssertionError, match="logits differ by"):
        same_bits(chain(native(model), ids, 5), expected)
