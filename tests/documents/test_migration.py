"""What docs/migration.md says, of transformers as much as of skipstone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import skipstone
from skipstone import LayerSkip
from tests.helpers import families
from tests.helpers.snippets import ROOT, run_python, table_rows, tiny_checkpoint

# how fast a tiny model runs is no matter here
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


PAGE = ROOT / "docs" / "migration.md"


def test_its_snippets_run_and_hold(tmp_path: Path) -> None:
    names = run_python(PAGE, tiny_checkpoint(tmp_path))
    assert names["after"].shape[1] > names["inputs"]["input_ids"].shape[1]


def test_its_names_are_those_that_are_understood() -> None:
    rows = [[cell.strip("`") for cell in row] for row in table_rows(PAGE) if row[1] in ("transformers", "LayerSkip")]
    understood = {alias: name for kind in (skipstone.LayerSkip, skipstone.EarlyExit) for alias, name in kind.aliases.items()}
    assert {row[0]: row[2] for row in rows} == understood


def lengths(model: PreTrainedModel, **options: Any) -> list[int]:
    """Of `assistant_early_exit`: how many positions each scoring pass looks at (a draft pass looks at one)."""
    seen: list[int] = []
    handle = model.lm_head.register_forward_hook(lambda *args: seen.append(args[2].shape[1]))
    try:
        model.generate(families.prompts(1)[0][None], assistant_early_exit=2, max_new_tokens=24, **options)
    finally:
        handle.remove()
    return [length for length in seen if length > 1]


def test_transformers_ignores_the_draft_length_as_a_keyword() -> None:
    model = families.build("llama")
    options = {"num_assistant_tokens": 4, "assistant_confidence_threshold": 0.0}
    assert set(lengths(model, **options)) != {5}
    model.generation_config.update(**options)
    assert max(lengths(model)) == 5
    assert lengths(model).count(5) >= 3


def test_transformers_runs_the_early_layers_again() -> None:
    model, prompt = families.build("llama"), families.prompts(1)[0][None]
    model.generation_config.update(num_assistant_tokens=4, assistant_confidence_threshold=0.0)
    passed = [0, 0]
    for place, index in enumerate((0, 3)):
        hook = lambda _, args, place=place: passed.__setitem__(place, passed[place] + args[0].shape[1])  # noqa: E731
        model.model.layers[index].register_forward_pre_hook(hook)
    theirs = model.generate(prompt, assistant_early_exit=2, max_new_tokens=24)
    early, late = passed
    assert early > 1.5 * late
    passed[:] = [0, 0]
    model.generation_config.update(num_assistant_tokens=None, assistant_confidence_threshold=None)
    ours = skipstone.generate(model, prompt, LayerSkip(2, 4), max_new_tokens=24)
    assert passed[0] == passed[1]
    assert torch.equal(ours.sequences, theirs)  # type: ignore[arg-type]
