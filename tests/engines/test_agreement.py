"""The verification of a model: what it costs, as tokens that go through layers, and that it finds what is computed otherwise in
one kind of pass only."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone.engines.agreement import disagreement
from skipstone.engines.eager.eager import EagerEngine
from skipstone.engines.model_runner import ModelRunner
from skipstone.models import recognition
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.derivation import find_layers
from skipstone.models.families import attention_reaches, text_config
from skipstone.models.passes import Pass
from skipstone.models.trace import shrunk_windows, trace
from tests.helpers import families
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


def test_a_second_model_of_the_shape_is_not_verified_again() -> None:
    ModelRunner(families.build("llama", vocab=61), "eager")
    model, tokens = families.build("llama", vocab=61, seed=1), Counter[int]()
    counted(model, tokens, Counter())
    ModelRunner(model, "eager")
    assert not tokens


SECOND = """
import sys
from collections import Counter
from skipstone.engines.model_runner import ModelRunner
from tests.helpers import families

model, passes = families.build("llama", vocab=59), Counter()
for number, layer in enumerate(model.model.layers):
    layer.register_forward_pre_hook(lambda *_, number=number: passes.update([number]))
ModelRunner(model, "eager")
print(sum(passes.values()))
"""


@pytest.mark.slow
def test_another_process_does_not_verify_the_family_again(tmp_path: Path) -> None:
    """What was found out is kept in a folder that nobody has made before."""
    environment = {**os.environ, "SKIPSTONE_CACHE": str(tmp_path / "not" / "there")}
    ask = [sys.executable, "-c", SECOND]
    first, second = (int(subprocess.check_output(ask, env=environment, text=True)) for _ in range(2))
    assert first > 0
    assert second == 0


def test_what_was_verified_is_kept_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "not" / "there"))
    ModelRunner(families.build("llama", vocab=53), "eager")
    (kept,) = (tmp_path / "not" / "there" / "families").iterdir()
    assert "self_attn" in kept.read_text()


@pytest.mark.parametrize("held", ['{"family": {"x": 1}}', "[]", "no JSON"])
def test_a_damaged_file_is_made_anew(held: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path))
    monkeypatch.setattr(recognition, "_KNOWN", {})
    ModelRunner(families.build("llama", vocab=51), "eager")
    (kept,) = (tmp_path / "families").iterdir()
    whole = kept.read_text()
    kept.write_text(held)
    monkeypatch.setattr(recognition, "_KNOWN", {})
    ModelRunner(families.build("llama", vocab=51, seed=1), "eager")
    assert kept.read_text() == whole


def a_wider_window_without_a_tree(patch: Patch) -> None:
    own = Pass._visible

    def visible(self: Pass, reach: Any) -> Tensor:
        return own(self, reach if self.tree is not None else reach._replace(window=reach.window and reach.window + 1))

    patch.setattr(Pass, "_visible", visible)


def branches_that_see_one_another(patch: Patch) -> None:
    own = Pass._visible

    def visible(self: Pass, reach: Any) -> Tensor:
        if self.tree is not None:
            self.tree.ancestors = torch.ones_like(self.tree.ancestors).tril()
        return own(self, reach)

    patch.setattr(Pass, "_visible", visible)


def trees_that_forget_what_is_before_them(patch: Patch) -> None:
    own = Pass._visible

    def visible(self: Pass, reach: Any) -> Tensor:
        if self.tree is not None:
            self.tree.seen = torch.ones_like(self.tree.base)
        return own(self, reach)

    patch.setattr(Pass, "_visible", visible)


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


@torch.no_grad()
def found_in(name: str) -> str | None:
    """Where the verification of a model finds more than is allowed, None where nowhere."""
    model = families.cached(name)
    facts, config = DecoderModel(model), text_config(model)
    engine = EagerEngine(model, facts)
    with shrunk_windows(config):
        engine.reaches = attention_reaches(config, facts.family)
    layers = torch.nn.ModuleList(facts.layers)
    difference = disagreement(engine, facts, trace(model, facts.decoder, layers, config, facts.max_positions))
    return None if difference.share <= difference.allowed else difference.where


MISTAKES: list[tuple[str, Plant]] = [
    *(("mistral", plant) for plant in (window_one_too_wide, a_wider_window_without_a_tree, phases_of_the_token_before)),
    *(("llama", plant) for plant in (branches_that_see_one_another, trees_that_forget_what_is_before_them)),
    *(("llama", plant) for plant in (trash_in_slot_zero, prompts_that_see_ahead)),
    *(("bloom", plant) for plant in (slots_taken_for_positions, branches_that_see_one_another)),
]


@pytest.mark.parametrize(("name", "plant"), MISTAKES)
def test_what_is_computed_otherwise_in_one_kind_of_pass_is_found(name: str, plant: Plant, monkeypatch: Patch) -> None:
    assert found_in(name) is None
    plant(monkeypatch)
    assert found_in(name) is not None
