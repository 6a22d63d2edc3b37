"""A token's bits depend on its text alone: not on what is computed beside it, on threads, or on the instruction set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.native.engine import NativeEngine
from skipstone.models.passes import Pass
from tests.helpers import families
from tests.helpers.native import (
    DTYPES,
    EACH_DTYPE,
    FAMILIES,
    NATIVE_ONLY,
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


@round_robin(name=FAMILIES, dtype=EACH_DTYPE)
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
    found = levels()
    if len(found) < 2:
        pytest.skip("this CPU has one level only")
    for dtype in DTYPES:
        model, ids = families.build(name).to(dtype), text(24)
        expected = chain(of_level(model, found[0]), ids, 1)
        for level in found:
            for width in (3, 24):
                assert_same_bits(chain(of_level(model, level), ids, width), expected)


@round_robin(name=FAMILIES, dtype=EACH_DTYPE)
def test_a_branch_of_a_tree_has_the_bits_of_the_same_chain(name: str, dtype: torch.dtype) -> None:
    model, base, nodes = families.build(name).to(dtype), 12, 30
    runner, parents = native(model, 2), grow(nodes, seed=len(name))
    prompt, drawn = text(base), text(nodes + 1, seed=6)
    for split in (nodes + 1, 9):
        store = KVCache(1, runner.depth, base + nodes + 1)
        store.reserve(base + nodes + 1)
        start = torch.arange(base)[None]
        at = Pass(start, start, None, slice(0, 1), base, 0)
        runner.run(runner.embed(prompt[None], start), at, store, range(runner.depth))
        parts = []
        for first in range(0, nodes + 1, split):
            columns = slice(first, min(first + split, nodes + 1))
            at = tree_pass(parents, base, columns)
            hidden = runner.run(runner.embed(drawn[None, columns], at.positions), at, store, range(runner.depth))
            parts.append(runner.project(runner.normed(hidden))[0])
        logits, branches = torch.cat(parts), [path_to(parents[0].tolist(), node) for node in range(nodes)]
        deepest = max(branches, key=len)
        assert len(deepest) > families.WINDOW, "the tree is shallow"
        for path in [branches[-1], branches[nodes // 2], deepest]:
            columns = [0, *(node + 1 for node in path)]
            whole = chain(runner, torch.cat([prompt, drawn[columns]]), 1)
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
