"""A token's bits depend on its text alone: not on what is computed beside it, on threads, or on the instruction set."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.models.engines.native import build, library
from skipstone.models.engines.native.engine import NativeEngine
from skipstone.models.facts import Facts
from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import Pass, Tree, ancestors
from tests.helpers import families
from tests.helpers.native import DTYPES, FAMILIES, Computed, assert_same_bits, chain, native, stored, text

pytestmark = [
    pytest.mark.skipif(library.missing() is not None, reason=str(library.missing())),
    pytest.mark.usefixtures("no_gradients"),
]


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_token_has_the_same_bits_in_every_pass(name: str, dtype: torch.dtype) -> None:
    model, ids = families.build(name).to(dtype), text()
    expected = chain(native(model), ids, 1)
    for width in (2, 3, 5, 8, 13, 64):
        assert_same_bits(chain(native(model), ids, width), expected)
    for threads in (2, 3):
        for width in (1, 5, 64):
            assert_same_bits(chain(native(model, threads), ids, width), expected)
    for threads, width in ((1, 4), (2, 7), (1, 19)):
        assert_same_bits(ragged(native(model, threads), ids, width), expected)


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
                assert_same_bits(chain(of_level(model, level), ids, width), expected)


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
            assert_same_bits((logits[columns], stored(store, 0, [base + column for column in columns])), expected)


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
