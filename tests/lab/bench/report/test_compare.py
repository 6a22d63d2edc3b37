"""Two runs side by side: what counts as worse, and what never does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skipstone.lab.bench.report import compare
from tests.helpers.results import lines, written


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return written(tmp_path / "a.jsonl", lines())


def slowed(by: float, everything: bool) -> list[dict[str, Any]]:
    found = lines()
    for line in found:
        for label, one in line.get("rows", {}).items():
            if everything or label == "layerskip":
                one["seconds"] *= by
    return found


@pytest.mark.parametrize(
    ("by", "everything", "slower"), [(1.0, False, False), (1.5, False, True), (1.5, True, False), (0.7, False, False)]
)
def test_a_method_is_slower_when_it_is_so_against_its_own_runs_yardstick(
    results: Path, tmp_path: Path, by: float, everything: bool, slower: bool
) -> None:
    """A slow day of the machine slows everything, and is nobody's fault."""
    changes = compare.compare(results, written(tmp_path / "b.jsonl", slowed(by, everything)))
    own = next(change for change in changes if change.label == "layerskip")
    assert own.slower(0.05) is slower
    assert own.speed.value == pytest.approx(1 / by)
    assert own.same == own.prompts == 2, "where some do not loop, those that do are left out"
    assert ("SLOWER" in compare.table(changes, 0.05).markdown()) is slower


def changed(tmp_path: Path, change: Any, label: str = "layerskip", without: tuple[str, ...] = ()) -> compare.MethodChange:
    """layerskip in a second run in which `change` was done to every row."""
    before, after = lines(), lines()
    for found in (before, after):
        for line in found:
            for name in without:
                line.get("rows", {}).pop(name, None)
                line.get("methods", {}).pop(name, None)
    for line in after:
        for name, one in line.get("rows", {}).items():
            change(name, one)
    found = compare.compare(written(tmp_path / "1.jsonl", before), written(tmp_path / "2.jsonl", after))
    return next(one for one in found if one.label == label)


def test_faster_plain_decoding_makes_nothing_slower(tmp_path: Path) -> None:
    """...neither over transformers' decoding nor where a run has only our own as yardstick."""

    def faster(name: str, one: dict[str, Any]) -> None:
        one["seconds"] *= 0.7 if name == "autoregressive" else 1

    assert not changed(tmp_path, faster).worse(0.05)
    alone = changed(tmp_path, faster, without=("hf-generate",))
    assert alone.relative is not None
    assert alone.relative.value == pytest.approx(0.7)
    assert not alone.worse(0.05)

    def slower(name: str, one: dict[str, Any]) -> None:
        one["seconds"] *= 1.5 if name == "layerskip" else 1

    assert changed(tmp_path, slower, without=("hf-generate",)).worse(0.05) == ["SLOWER"]


def test_other_texts_and_lower_scores_are_worse(tmp_path: Path) -> None:
    def other(name: str, one: dict[str, Any]) -> None:
        if name == "layerskip":
            one["digests"] = ["x"]

    assert changed(tmp_path, other).worse(0.05) == ["OTHER TEXTS: 0 instead of 1 are those of transformers' generate"]

    def wrong(name: str, one: dict[str, Any]) -> None:
        one["scores"] = [{"exact_match": -1.0}] if name == "layerskip" else one["scores"]

    found = changed(tmp_path, wrong)
    assert found.scores["exact_match"].value == pytest.approx(-1.5)
    assert found.worse(0.05) == ["LOWER exact_match"]
    assert not changed(tmp_path, lambda *_: None).worse(0.05)


def test_runs_with_nothing_in_common_cannot_be_compared(results: Path, tmp_path: Path) -> None:
    other = lines()
    for line in other:
        if line["kind"] == "prompt":
            line["digest"] += "x"
    with pytest.raises(ValueError, match="no model, task, settings of it, method and prompt in common"):
        compare.compare(results, written(tmp_path / "b.jsonl", other))


def test_a_change_is_weighed_by_time_and_not_by_prompts(tmp_path: Path) -> None:
    """A long prompt that has become slower is not outvoted by short ones."""

    def run_of(by: float) -> list[dict[str, Any]]:
        found = lines()
        for index, line in enumerate(line for line in found if line["kind"] == "prompt"):
            for label, one in line["rows"].items():
                scale = 100 if index == 0 else 1
                one["tokens"], one["seconds"] = one["tokens"] * scale, one["seconds"] * scale
                one["seconds"] *= by if index == 0 and label == "layerskip" else 1
        return found

    changes = compare.compare(written(tmp_path / "a.jsonl", run_of(1.0)), written(tmp_path / "b.jsonl", run_of(1.3)))
    own = next(change for change in changes if change.label == "layerskip")
    assert own.relative is not None
    assert own.relative.value == pytest.approx(101 / (130 + 1))


def test_only_what_was_asked_alike_is_compared_and_equal_prompts_keep_their_order(results: Path, tmp_path: Path) -> None:
    other, twins = lines(), lines()
    for line in other:
        if "question" in line:
            line["question"] = "another"
    with pytest.raises(ValueError, match="in common"):
        compare.compare(results, written(tmp_path / "b.jsonl", other))
    for line in twins:
        if line["kind"] == "prompt":
            line["digest"] = "same"
    path = written(tmp_path / "c.jsonl", twins)
    own = next(change for change in compare.compare(path, path) if change.label == "layerskip")
    assert (own.prompts, own.same, own.speed.value) == (2, 2, 1.0)
