"""What a report says of AdaDecode's exits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skipstone.bench.report import report
from skipstone.bench.report.by_method import by_exit_head, by_threshold, rates, tallies
from tests.helpers.results import lines, written

LABELS = {"a": 0.2, "b": 0.75, "c": 0.9}
"""Label -> threshold."""


EXITS = {
    "6": {"tests": 40, "predicted": 20, "accepted": 12, "rejected": 4},
    "12": {"tests": 20, "predicted": 10, "accepted": 8, "rejected": 0},
}


def early(settings: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The run of tests/helpers/results.py with AdaDecode in the place of LayerSkip, once for every label."""
    found = lines()
    own = found[0]["methods"]["layerskip"]
    found[0]["methods"] |= {label: {**own, "method": "adadecode", "settings": one} for label, one in settings.items()}
    found = [line for line in found if line["kind"] != "tuned"]
    for line in (line for line in found if "rows" in line):
        layerskip = line["rows"].pop("layerskip")
        for label, one in settings.items():
            known = {"threshold": one.get("threshold", 0.75), "exits": EXITS}
            line["rows"][label] = {**layerskip, "known": known, "grown": {"exits": EXITS}}
    return found


def settings(**changes: Any) -> dict[str, dict[str, Any]]:
    return {
        label: {"heads": "mine", "guard": False, "threshold": threshold, "max_pending": 5, "recheck": False, **changes}
        for label, threshold in LABELS.items()
    }


def test_counts_are_of_this_group_and_rates_by_hand(tmp_path: Path) -> None:
    """Three prompts of 101 tokens: 60 predictions accepted, 12 of 72 rejected."""
    _, (group,) = report.load([written(tmp_path / "a.jsonl", early(settings()))])
    assert tallies(group, "a") == {
        6: {"tests": 120, "predicted": 60, "accepted": 36, "rejected": 12},
        12: {"tests": 60, "predicted": 30, "accepted": 24, "rejected": 0},
    }
    assert rates(group, "a") == (pytest.approx(60 / 303), pytest.approx(12 / 72))
    assert rates(group, "autoregressive") == (None, None)
    table = by_exit_head(group)
    assert [row[0] for row in table.rows] == ["a", "b", "c"]
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert (cells["threshold"], cells["tokens predicted early"], cells["rejected"]) == ("0.20", "20 %", "17 %")
    assert cells["of the tests at each exit (rejected)"] == "6: 50 % (25 %), 12: 50 % (0 %)"
    assert cells["same texts"] == "2/3", "the first prompt's text is another"
    assert cells["decode speed-up"] == "2.22", "1.0 s of plain decoding against .45"


def test_figure_5_is_of_rows_that_differ_in_their_threshold_alone(tmp_path: Path) -> None:
    curves = by_threshold(report.load([written(tmp_path / "a.jsonl", early(settings()))])[1][0])
    assert [point[0] for point in curves["predicted early"]] == [0.2, 0.75, 0.9]
    assert curves["rejected"][0][1] == pytest.approx(12 / 72)
    page = report.report([tmp_path / "a.jsonl"], "html")
    assert "Speed and early predictions by threshold" in page
    for number, change in enumerate(({"guard": True}, {"max_pending": 2}, {"recheck": True})):
        changed = settings()
        changed["c"] |= change
        (group,) = report.load([written(tmp_path / f"{number}.jsonl", early(changed))])[1]
        assert by_threshold(group) == {}, change
    changed = settings()
    changed["c"]["heads"] = "others"
    assert by_threshold(report.load([written(tmp_path / "z.jsonl", early(changed))])[1][0]) == {}


def test_runs_without_exit_heads_have_no_such_table(tmp_path: Path) -> None:
    _, (group,) = report.load([written(tmp_path / "a.jsonl", lines())])
    assert not by_exit_head(group).rows
    assert by_threshold(group) == {}
