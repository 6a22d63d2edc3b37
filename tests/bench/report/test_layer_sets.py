"""What a report says of methods that skip sublayers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skipstone.bench.report import report
from skipstone.bench.report.by_method import along, by_layer_set, learnt, matrix
from tests.helpers.results import lines, written

HISTORY = [
    {"evaluation": 0, "tokens": 0.0, "matchness": None, "attention": [1], "mlp": [2]},
    {"evaluation": 7, "tokens": 90.0, "matchness": 0.9, "attention": [1, 2], "mlp": []},
]
KNOWN = {"skip_ratio": 0.5, "skipped": {"attention": [1, 2], "mlp": []}, "matchness": 0.9, "evaluations": 9, "history": HISTORY}


def skipping() -> list[dict[str, Any]]:
    """The run of tests/helpers/results.py, its layerskip reporting a layer set, with a fifth of its time spent in search."""
    found = lines()
    for line in found:
        for label, row in line.get("rows", {}).items():
            if label == "layerskip":
                row["known"] = {**KNOWN, "matchness": 0.5 + 0.1 * line["index"]}
                row["stats"] |= {"seconds_search": 0.1025, "drafting": row["stats"]["steps"]}
    return found


def test_a_row_says_what_was_left_out_and_what_that_should_have_brought(tmp_path: Path) -> None:
    """By hand: 50 steps of 2 drafts, of which 1 is right: M = 2, alpha = .5; a plain token takes 10 ms, a step's two drafts
    3 ms, its scoring 5: c = .15, v = .5. E = 2 / (2 c + v), and 2 / (2 c + 1) as in the paper."""
    _, (group,) = report.load([written(tmp_path / "a.jsonl", skipping())])
    table = by_layer_set(group)
    (row,) = table.rows
    cells = dict(zip(table.columns, row, strict=True))
    assert cells["method"] == "layerskip"
    assert (cells["skip ratio"], cells["left out"], cells["matchness"], cells["judged"]) == ("0.50", "2", "0.70", "9")
    assert cells["steps that drafted"] == "100 %"
    assert cells["time in search"] == "20.0 %"
    assert (cells["c"], cells["v"]) == ("0.15", "0.50")
    assert (cells["E, v = 1"], cells["E"]) == ("1.54", "2.50")
    text = report.report([tmp_path / "a.jsonl"], "md")
    assert "sums: layer sets" in text


def test_runs_without_layer_sets_have_no_such_table(tmp_path: Path) -> None:
    _, (group,) = report.load([written(tmp_path / "a.jsonl", lines())])
    assert learnt(group) == {}
    assert not by_layer_set(group).rows
    assert "layer sets" not in report.report([tmp_path / "a.jsonl"], "md")


def test_pictures_show_layers_speed_and_matchness_along_the_text(tmp_path: Path) -> None:
    _, (group,) = report.load([written(tmp_path / "a.jsonl", skipping())])
    assert matrix(KNOWN, 4) == (
        [0, 7],
        [
            [False, False],
            [True, True],
            [False, True],
            [False, False],
            [False, False],
            [False, False],
            [True, False],
            [False, False],
        ],
    )
    places, speeds, matchness = along(group, "layerskip")
    assert places == [101, 202, 303]
    assert matchness == pytest.approx([0.5, 0.6, 0.7])
    assert speeds[0] == pytest.approx(1.1 / 0.55)
    page = report.report([tmp_path / "a.jsonl"], "html")
    for title in ("Layers left out, layerskip", "Speed along the text", "Matchness along the text"):
        assert title in page
    assert json.loads(report.report([tmp_path / "a.jsonl"], "json"))
