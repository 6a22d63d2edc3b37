"""Masks: every entry that a query of a pass may see, against the definition."""

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

import skipstone
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.models.passes import AttentionReach, MaskForm, Pass
from tests.helpers import families, planted
from tests.helpers.enumeration import Tabled

BOOL = MaskForm(torch.bool, optional=False)
ROOT = -1


def descends(parents: list[int], node: int, ancestor: int) -> bool:
    """Whether `ancestor` (a node, or the root) is the node itself or above it."""
    while node != ancestor and node != ROOT:
        node = parents[node]
    return node == ancestor


def depth_of(parents: list[int], node: int) -> int:
    return 0 if node == ROOT else 1 + depth_of(parents, parents[node])


def visible(base: int, parents: list[int], node: int, slot: int, window: int | None) -> bool:
    """The definition. Slots below `base` hold committed tokens, slot base the root, base + 1 + i node i of this step."""
    position, other = slot, slot - base - 1
    if slot >= base:
        if other >= len(parents) or not descends(parents, node, other):
            return False
        position = base + depth_of(parents, other)
    return window is None or base + depth_of(parents, node) - position < window


class Spied(Tabled):
    """A fake model that keeps the passes that run."""

    def __init__(self) -> None:
        super().__init__([0.5, 0.5], [0.5, 0.5])
        self.depth, self.passes = 4, []

    def run(self, hidden: Tensor, at: Any, store: Any, layers: range, *_: Any, **__: Any) -> Tensor:
        self.passes.append(at)
        return hidden + len(layers)


def spied(lengths: list[int], alive: list[bool], width: int) -> tuple[Any, PartialForward, KVCache]:
    model: Any = Spied()
    store, roots = KVCache(len(lengths), 4, 64), torch.zeros(len(lengths), dtype=torch.long)
    store.length = list(lengths)
    return model, PartialForward(model, store, roots, alive, [width] * len(lengths)), store


def random_parents(dice: random.Random, rows: int, width: int) -> list[list[int]]:
    return [[dice.randrange(-1, node) if node else ROOT for node in range(width)] for _ in range(rows)]


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_scoring_pass_sees_what_the_definition_says(shape: str, window: int | None) -> None:
    dice = random.Random(f"{shape} {window}")
    seen_both = set()
    for _ in range(25):
        rows, width = dice.randint(1, 3), dice.randint(1, 9)
        lengths = [dice.randint(0, 12) for _ in range(rows)]
        alive = [row == 0 or dice.random() < 0.8 for row in range(rows)]
        model, forward, store = spied(lengths, alive, width)
        chain = [list(range(-1, width - 1))] * rows
        parents = chain if shape == "chain" else random_parents(dice, rows, width)
        valid = torch.tensor([[dice.random() < 0.8 for _ in range(width)] for _ in range(rows)])
        if shape == "chain":
            valid = valid.long().cumprod(1).bool()
        given = None if shape == "chain" else torch.tensor(parents)
        forward.append(torch.zeros(rows, width, dtype=torch.long), valid, given)
        forward.advance(4)
        (at,) = model.passes
        mask = at.mask(AttentionReach(window), BOOL)
        assert mask.shape == (rows, 1, width + 1, at.extent)
        slots = store.view(at).slots
        for row, column in itertools.product(range(rows), range(width + 1)):
            node, base = column - 1, lengths[row]
            real = alive[row] and (node == ROOT or bool(valid[row, node]))
            assert int(slots[row, column]) == (base + column if real else store.trash)
            for slot in range(at.extent):
                expected = visible(base, parents[row], node, slot, window) if real else slot == 0
                assert bool(mask[row, 0, column, slot]) == expected, (row, column, slot)
                seen_both.add((real, expected))
        assert at.extent <= store.trash, "the trash lies beyond everything that can be attended to"
    assert len(seen_both) == 4


@pytest.mark.usefixtures("eager_engine")
def test_a_pass_over_all_layers_builds_one_mask_per_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3's layers have two kinds: in a step of decoding, each is built once a pass, whatever the number of layers."""
    passes: list[list[int | None]] = []
    visible, run = Pass._visible, Pass.__init__
    model, prompts = families.cached("gemma3_text"), families.prompts(2)
    ModelRunner(model)  # verified before the count
    monkeypatch.setattr(Pass, "_visible", lambda self, reach: passes[-1].append(reach.window) or visible(self, reach))
    monkeypatch.setattr(Pass, "__init__", lambda self, *given, **more: passes.append([]) or run(self, *given, **more))
    skipstone.generate(model, families.padded(prompts), skipstone.Autoregressive(), max_new_tokens=6)
    assert len(passes) >= 6
    assert all(len(one) == len(set(one)) for one in passes), "a mask was built twice in a pass"
    assert any(len(one) == 2 for one in passes), "both kinds were needed"


@planted.found_by(
    (planted.siblings_see_one_another, lambda: test_a_scoring_pass_sees_what_the_definition_says("tree", None)),
    (planted.window_one_too_wide, lambda: test_a_scoring_pass_sees_what_the_definition_says("chain", 3)),
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
