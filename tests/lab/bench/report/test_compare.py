"""Comparisons of two runs: what counts as worse, and what never does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skipstone.lab.bench.report import compare
from tests.helpers.results import lines, written

Change = Callable[[str, dict[str, Any]], None]  # of a label and its row


def changed(tmp_path: Path, change: Change, without: str = "") -> compare.MethodChange:
    """layerskip in a second run with a change of every row. without: a method that neither run has."""
    before, after = lines(), lines()
    for line in (*before, *after):
        for part in ("rows", "methods"):
            line.get(part, {}).pop(without, None)
    for line in after:
        for name, row in line.get("rows", {}).items():
            change(name, row)
    changes = compare.compare(written(tmp_path / "1.jsonl", before), written(tmp_path / "2.jsonl", after))
    return next(one for one in changes if one.label == "layerskip")


def slowed(by: float, only: str = "") -> Change:
    def change(name: str, row: dict[str, Any]) -> None:
        row["seconds"] *= by if only in name else 1

    return change


@pytest.mark.parametrize(
    ("change", "slower", "speed", "relative", "without"),
    [
        (slowed(1.5, "layerskip"), True, 1 / 1.5, 1 / 1.5, ""),
        (slowed(1.5), False, 1 / 1.5, 1.0, ""),  # a slower machine slows everything
        (slowed(0.7, "autoregressive"), False, 1.0, 1.0, ""),  # faster plain decoding makes nothing slower
        (slowed(0.7, "autoregressive"), False, 1.0, 0.7, "hf-generate"),
        (slowed(1.5, "layerskip"), True, 1 / 1.5, 1 / 1.5, "hf-generate"),
    ],
)
def test_a_method_is_slower_if_it_is_so_against_its_own_runs_yardstick(
    tmp_path: Path, change: Change, slower: bool, speed: float, relative: float, without: str
) -> None:
    own = changed(tmp_path, change, without)
    assert own.regressions(0.05) == ["SLOWER"] * slower
    assert own.speed.value == pytest.approx(speed)
    assert own.relative is not None
    assert own.relative.value == pytest.approx(relative)
    assert own.same == own.prompts == 2, "if some prompts do not loop, those that do are left out"
    assert ("SLOWER" in compare.table([own], 0.05).markdown()) is slower


def test_other_texts_and_lower_scores_are_worse(tmp_path: Path) -> None:
    def other(name: str, row: dict[str, Any]) -> None:
        if name == "layerskip":
            row |= {"digests": ["x"], "scores": [{"exact_match": -1.0}]}

    found = changed(tmp_path, other)
    assert found.scores["exact_match"].value == pytest.approx(-1.5)
    texts = "OTHER TEXTS: 0 instead of 1 are those of transformers' generate"
    assert found.regressions(0.05) == [texts, "LOWER exact_match"]


@pytest.mark.parametrize("key", ["question", "digest"])
def test_runs_with_nothing_in_common_cannot_be_compared(tmp_path: Path, key: str) -> None:
    other = lines()
    for line in (line for line in other if key in line):
        line[key] += "x"
    with pytest.raises(ValueError, match="no model, task, settings of it, method and prompt in common"):
        compare.compare(written(tmp_path / "a.jsonl", lines()), written(tmp_path / "b.jsonl", other))


def test_a_change_is_weighed_by_time_and_not_by_prompts(tmp_path: Path) -> None:
    """A long prompt that has become slower outweighs a short one."""

    def run_of(by: float) -> list[dict[str, Any]]:
        found = lines()
        for label, row in found[2]["rows"].items():
            row["tokens"] *= 100
            row["seconds"] *= 100 * (by if label == "layerskip" else 1)
        return found

    changes = compare.compare(written(tmp_path / "a.jsonl", run_of(1.0)), written(tmp_path / "b.jsonl", run_of(1.3)))
    own = next(change for change in changes if change.label == "layerskip")
    assert own.relative is not None
    assert own.relative.value == pytest.approx(101 / (130 + 1))
