"""What the tests of the native engine compute with it, and how they compare."""

import copy
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import build, library
from skipstone.engines.native.engine import NativeEngine
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.layer_variants import LAYER_VARIANTS
from skipstone.models.passes import Pass, SkipSet, Tree, ancestors
from tests.helpers import families

NATIVE_ONLY = [
    pytest.mark.skipif(library.missing() is not None, reason=str(library.missing())),
    pytest.mark.usefixtures("no_gradients"),
]
FAMILIES = list(LAYER_VARIANTS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EACH_DTYPE = [pytest.param(dtype, id=str(dtype)) for dtype in DTYPES]
LENGTH = 64  # tokens of a text: eight windows
ALLOWED = 8  # times the error that torch's own float32 has


def text(length: int = LENGTH, seed: int = 5, vocab: int = 97) -> Tensor:
    return torch.randint(1, vocab, (length,), generator=torch.Generator().manual_seed(seed))


def native(model: Any, threads: int = 1, kv_dtype: str | None = None, compute_dtype: str | None = None) -> ModelRunner:
    runner = ModelRunner(model, "native", kv_dtype=kv_dtype, compute_dtype=compute_dtype)
    runner.engine.threads = threads  # pyright: ignore[reportAttributeAccessIssue]
    return runner


def levels() -> list[str]:
    """The levels of the instruction set that this CPU has and that are built."""
    known = [level.name for level in build.levels() if level.features <= library.features()]
    return [level for level in known if library.find(build.HERE, library.features(), level).library is not None]


def of_level(model: Any, level: str, compute_dtype: str | None = None) -> ModelRunner:
    """The model on an engine of its own, from the library of a level."""
    found, before = library.find(build.HERE, library.features(), level), library.load
    assert found.library is not None, found.missing
    runner = ModelRunner(model, "eager")
    try:
        library.load = lambda: found.library  # pyright: ignore[reportAttributeAccessIssue]
        runner.engine = NativeEngine(model, DecoderModel(model), rounds_inputs=compute_dtype != "float32")
    finally:
        library.load = before
    runner.engine.threads, runner.dtype = 1, torch.float32
    assert level in runner.engine.detail
    return runner


Computed = tuple[Tensor, Tensor]
"""Logits [T, V], and keys and values of all layers [2 layers, kv heads, T, padded head size] of one text."""


def stored(store: KVCache, row: int, slots: Any) -> Tensor:
    return torch.stack([buffer[row][:, slots] for buffer in (*store.keys, *store.values)])  # pyright: ignore


def chain(runner: ModelRunner, ids: Tensor, width: int) -> Computed:
    store, parts = KVCache(1, runner.depth, len(ids), runner.kv_dtype), []
    store.reserve(len(ids))
    for start in range(0, len(ids), width):
        stop = min(start + width, len(ids))
        positions = torch.arange(start, stop)[None]
        at = Pass(positions, positions, None, slice(0, 1), stop, start)
        hidden = runner.run(runner.embed(ids[None, start:stop], positions), at, store, range(runner.depth))
        parts.append(runner.project(runner.normed(hidden))[0])
    return torch.cat(parts), stored(store, 0, slice(0, len(ids)))


def ragged(runner: ModelRunner, ids: Tensor, width: int) -> Computed:
    """A text as row 2 of a store in which the rows beside it are at other positions and hold fewer tokens."""
    dice, store, parts, at_position = random.Random(width), KVCache(4, runner.depth, len(ids), runner.kv_dtype), [], [0, 0, 0]
    store.reserve(len(ids))
    others = [text(len(ids), seed=7), ids, text(len(ids), seed=8)]
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
        before = runner.embed(tokens, positions)
        hidden = runner.run(before, at, store, range(runner.depth))
        assert torch.equal(hidden[~valid], before[~valid]), "an invalid entry was changed"
        parts.append(runner.project(runner.normed(hidden))[1][valid[1]])
    return torch.cat(parts), stored(store, 2, slice(0, len(ids)))


def grow(nodes: int, seed: int) -> Tensor:
    """parents [1, nodes] of a random tree that is deep enough to leave a window behind."""
    dice = random.Random(seed)
    return torch.tensor([[dice.randint(max(-1, i - 3), i - 1) for i in range(nodes)]])


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def tree_pass(parents: Tensor, base: int, columns: slice) -> Pass:
    """Columns of a tree whose root, column 0, lies in slot `base`."""
    seen = ancestors(parents)
    positions, slots = base + seen.sum(2) - 1, torch.arange(base, base + parents.shape[1] + 1)[None]
    tree = Tree(torch.tensor([base]), seen[:, columns], positions)
    return Pass(positions[:, columns], slots[:, columns], None, slice(0, 1), base + columns.stop, None, tree)


def assert_branches_are_chains(runner: ModelRunner, parents: Tensor, base: int, splits: Iterable[slice], width: int) -> None:
    """A tree behind a prompt of `base` tokens, in passes over some of its columns: some branches, the deepest one among them,
    have the bits of the same text as a chain in passes of `width` tokens."""
    nodes = parents.shape[1]
    prompt, drawn = text(base), text(nodes + 1, seed=6)
    store, start, parts = KVCache(1, runner.depth, base + nodes + 1, runner.kv_dtype), torch.arange(base)[None], []
    store.reserve(base + nodes + 1)
    at = Pass(start, start, None, slice(0, 1), base, 0)
    runner.run(runner.embed(prompt[None], start), at, store, range(runner.depth))
    for columns in splits:
        at = tree_pass(parents, base, columns)
        hidden = runner.run(runner.embed(drawn[None, columns], at.positions), at, store, range(runner.depth))
        parts.append(runner.project(runner.normed(hidden))[0])
    logits, branches = torch.cat(parts), [path_to(parents[0].tolist(), node) for node in range(nodes)]
    deepest = max(branches, key=len)
    assert len(deepest) > families.WINDOW, "the tree is shallow"
    for path in [branches[-1], branches[nodes // 2], deepest]:
        columns = [0, *(node + 1 for node in path)]
        whole = chain(runner, torch.cat([prompt, drawn[columns]]), width)
        expected = whole[0][base:], whole[1][:, :, base:]
        assert_same_bits((logits[columns], stored(store, 0, [base + column for column in columns])), expected)


def assert_same_bits(found: Computed, expected: Computed) -> None:
    for what, a, b in zip(("logits", "keys and values"), found, expected, strict=True):
        assert a.shape == b.shape
        assert bool(b.isfinite().all())
        assert b.std() > 0.01, "the reference is degenerate"
        assert torch.equal(a.view(torch.int32), b.view(torch.int32)), f"{what} differ by {(a - b).abs().max():.3g}"


class Exact(TorchFunctionMode):
    """float64 wherever transformers' own code asks for float32 (norms, softmax, rotary phases)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        swap = lambda one: torch.float64 if one is torch.float32 else one  # noqa: E731
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*map(swap, args), **{key: swap(value) for key, value in (kwargs or {}).items()})


def scenario(runner: ModelRunner, vocab: int, seed: int, skip: SkipSet | None = None, step: int = 1) -> list[Tensor]:
    """States after every `step` layers, then logits, of ragged prompts and a tree on each: [valid entries, width]."""
    dice, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths, nodes = [dice.randint(1, 14) for _ in range(3)], 9
    width, found = max(lengths), []
    store = KVCache(3, runner.depth, width + nodes + 1)
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
        hidden = runner.embed(tokens, at.positions)
        for first in range(0, runner.depth, step):
            before = hidden
            hidden = runner.run(before, at, store, range(first, min(first + step, runner.depth)), skip)
            if runner.engine.name == "native":
                assert torch.equal(hidden[~at.valid], before[~at.valid]), "an invalid entry was changed"
            found.append(hidden[at.valid])
        found.append(runner.project(runner.normed(hidden))[at.valid])
    return found


def references(model: Any, vocab: int, seed: int, skip: SkipSet | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """What torch computes in float32, and in float64, with the weights as they are stored."""
    copies = copy.deepcopy(model).float(), copy.deepcopy(model).double()
    rough = scenario(ModelRunner(copies[0], "eager"), vocab, seed, skip)
    with Exact():
        exact = scenario(ModelRunner(copies[1], "eager"), vocab, seed, skip)
    assert exact[0].dtype == torch.float64
    return rough, exact


def assert_near(found: list[Tensor], rough: list[Tensor], exact: list[Tensor]) -> None:
    """Assert that no error is larger than ALLOWED times that of torch's float32."""
    for place, (mine, theirs, right) in enumerate(zip(found, rough, exact, strict=True)):
        assert right.std() > 1e-3, "the reference is degenerate"
        own = max((theirs - right).abs().max().item(), 2**-24 * right.abs().max().item())
        error = (mine - right).abs().max().item()
        assert error <= ALLOWED * own, f"output {place} is off by {error:.3g}, torch's float32 by {own:.3g}"


def shaped(name: str, seed: int) -> tuple[Any, int]:
    """A model of a family in a random shape, and its vocabulary."""
    dice = random.Random(f"{name} {seed}")
    vocab, heads = dice.choice([97, 113]), dice.choice([4, 6])
    settings: dict[str, Any] = {
        "hidden_size": dice.choice([24, 36, 48] if heads == 6 else [24, 36, 40, 48]),  # multiples of the heads
        "head_dim": dice.choice([4, 8, 12, 20]),
        "num_attention_heads": heads,
        "num_key_value_heads": dice.choice([1, 2, heads]),
        "intermediate_size": dice.choice([20, 40, 72]),
    }
    if getattr(families.cached(name).config, "sliding_window", None):
        settings["sliding_window"] = dice.choice([2, 3, 8])
    return families.build(name, vocab=vocab, seed=seed, **settings), vocab
