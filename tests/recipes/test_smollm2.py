"""The scripts of recipes/smollm2 that need no model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "recipes" / "smollm2"


def script(name: str) -> Any:
    """A script of the folder as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_shortlist_is_the_commonest_tokens_ascending() -> None:
    shortlist, said = script("shortlist"), [[5, 9, 5], [9, 5, 2], [7]]
    assert shortlist.commonest(said, 2) == [5, 9]
    assert shortlist.commonest(said, 9) == [2, 5, 7, 9]


def test_what_is_measured_on_was_not_trained_on() -> None:
    """Spec-Bench: eight categories of ten questions, then five of eighty."""
    sizes = [10] * 8 + [80] * 5
    kinds = [f"kind {number}" for number, size in enumerate(sizes) for _ in range(size)]
    records = [{"question_id": 81 + place, "category": kind, "turns": [str(place)]} for place, kind in enumerate(kinds)]
    (source,) = yaml.safe_load((FOLDER / "heads-instructions.yaml").read_text())["prompts"]
    seen = source["where"]["question_id"]
    left = script("questions").left_out(records, seen)
    trained = {str(number - 81) for first, last in seen for number in range(first, last + 1)}
    measured = {one["turns"][0] for one in left}
    assert len(trained) == len(measured) == len(left) == 240
    assert not trained & measured
    assert [one["category"] for one in left[:13]] == [f"kind {number}" for number in range(13)]
    assert {kind: kinds.count(kind) / 2 for kind in kinds} == {
        kind: sum(one["category"] == kind for one in left) for kind in kinds
    }
