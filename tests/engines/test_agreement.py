"""Verification of a model: its cost in tokens, and that it finds a mistake in only one kind of pass."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.engines.eager.eager import EagerEngine
from skipstone.engines.model_runner import ModelRunner
from skipstone.models import recognition
from skipstone.models.derivation import find_layers
from skipstone.models.families import text_config
from skipstone.models.layer_variants import LAYER_VARIANTS
from skipstone.models.passes import Pass
from tests.helpers import families, support
from tests.helpers.planted import Patch, Plant, trash_in_slot_zero, window_one_too_wide

ALLOWED = 2 * 64  # tokens a layer: two passes over 64
TRACED = 2 * 20  # those of the model's own forward that its family is derived from
VERIFIED = {False: 2 * 10 + 2 * 18 + 6, True: 2 * 10 + 2 * 2 + 2 * 14 + 6}
"""Those that skipstone computes: a ragged batch and a tree, or where there are recurrent states chains; and one row alone."""
CALLS = {False: 5, True: 9}


def counted(model: Any, into: Counter[int], calls: Counter[int]) -> None:
    """Count rows x positions, padding too, of every call of a layer from now on, and the calls."""

    def hook(number: int) -> Any:
        def count(_: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
            hidden = given[0] if given else named["hidden_states"]
            into[number] += hidden.shape[-3] * hidden.shape[-2]  # streams of states (Gemma 3n) stand before the rows
            calls[number] += 1

        return count

    for number, layer in enumerate(find_layers(model, text_config(model))[2]):
        layer.register_forward_pre_hook(hook(number), with_kwargs=True)


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "mpt", "gemma3n_text", "llama4_text", "lfm2", "qwen3_next"])
def test_trace_and_verification_take_no_more_than_two_passes_over_64_tokens(name: str) -> None:
    model, recurrent = families.build(name, vocab=67), name in families.HYBRIDS  # a shape of config that nobody has verified
    tokens: Counter[int] = Counter()
    calls: Counter[int] = Counter()
    counted(model, tokens, calls)
    depth = ModelRunner(model, "eager").depth
    assert tokens == dict.fromkeys(range(depth), TRACED + VERIFIED[recurrent])
    assert tokens[0] <= ALLOWED
    rows = name == "mpt"  # whose bias serves one row: a tree is run row by row
    assert calls == dict.fromkeys(range(depth), CALLS[recurrent] + rows)


@pytest.mark.usefixtures("untested")
@pytest.mark.parametrize("damage", [None, '{"family": {"x": 1}}', "[]", "no JSON"])
def test_what_was_verified_is_kept_on_the_disk(damage: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(recognition, "_KNOWN", {})
    ModelRunner(families.build("llama", vocab=53), "eager")
    (saved,) = (tmp_path / "not" / "there" / "families").iterdir()
    assert "self_attn" in (content := saved.read_text())
    if damage is not None:
        saved.write_text(damage)
    for process in ("another", "the same"):
        if process == "another":
            recognition._KNOWN.clear()
        model, tokens = families.build("llama", vocab=53, seed=1), Counter[int]()
        counted(model, tokens, Counter())
        ModelRunner(model, "eager")
        assert bool(tokens) == (damage is not None and process == "another")
    assert saved.read_text() == content


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_moe", "lfm2"])
def test_tested_types_are_not_verified_again(name: str) -> None:
    model, tokens = families.build(name, vocab=59), Counter[int]()
    counted(model, tokens, Counter())
    depth = ModelRunner(model, "eager").depth
    traced = {} if name in LAYER_VARIANTS else dict.fromkeys(range(depth), TRACED)
    assert tokens == traced


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("name", LAYER_VARIANTS)
def test_a_family_that_the_config_tells_is_the_one_that_a_trace_shows(name: str, attention: str) -> None:
    model = families.build(name, vocab=61)
    if attention == "eager":
        model.set_attn_implementation("eager")
    assert recognition.recognise(model).key == ""
    assert recognition.recognise(model).family == recognition.derived_family(model)


def seen_otherwise(change: Callable[[Pass, Any], Any]) -> Plant:
    """A mistake in what a pass sees. change: alters the pass, and returns the reach that is taken instead."""
    own = Pass._visible

    def plant(patch: Patch) -> None:
        patch.setattr(Pass, "_visible", lambda self, reach: own(self, change(self, reach)))

    plant.__name__ = change.__name__
    return plant


@seen_otherwise
def a_wider_window_without_a_tree(at: Pass, reach: Any) -> Any:
    return reach if at.tree is not None else reach._replace(window=reach.window and reach.window + 1)


@seen_otherwise
def branches_that_see_one_another(at: Pass, reach: Any) -> Any:
    if at.tree is not None:
        at.tree.ancestors = torch.ones_like(at.tree.ancestors).tril()
    return reach


@seen_otherwise
def trees_that_forget_what_is_before_them(at: Pass, reach: Any) -> Any:
    if at.tree is not None:
        at.tree.seen = torch.ones_like(at.tree.base)
    return reach


def slots_taken_for_positions(patch: Patch) -> None:
    patch.setattr(Pass, "slot_positions", lambda self: torch.arange(self.extent)[None])


def phases_of_the_token_before(patch: Patch) -> None:
    own = EagerEngine._phases

    def phases(self: EagerEngine, source: Any, hidden: Tensor, at: Pass) -> Any:
        if not at.first_slot:
            return own(self, source, hidden, at)
        return own(self, source, hidden, Pass(at.positions, at.slots, None, at.rows, at.extent, at.first_slot - 1))

    patch.setattr(EagerEngine, "_phases", phases)


def prompts_that_see_ahead(patch: Patch) -> None:
    own = Pass.mask

    def mask(self: Pass, reach: Any, form: Any, groups: int = 1) -> Tensor | None:
        everything = torch.zeros(1, 1, groups * self.shape[1], self.extent)
        return everything if self.first_slot == 0 else own(self, reach, form, groups)

    patch.setattr(Pass, "mask", mask)


MISTAKES: list[tuple[str, Plant]] = [
    *(("mistral", plant) for plant in (window_one_too_wide, a_wider_window_without_a_tree, phases_of_the_token_before)),
    *(("llama", plant) for plant in (branches_that_see_one_another, trees_that_forget_what_is_before_them)),
    *(("llama", plant) for plant in (trash_in_slot_zero, prompts_that_see_ahead)),
    *(("bloom", plant) for plant in (slots_taken_for_positions, branches_that_see_one_another)),
]


@pytest.mark.parametrize(("name", "plant"), MISTAKES)
def test_what_is_computed_otherwise_in_one_kind_of_pass_is_found(name: str, plant: Plant, monkeypatch: Patch) -> None:
    assert support.differing_place(families.cached(name)) is None
    plant(monkeypatch)
    assert support.differing_place(families.cached(name)) is not None
