"""What a report says of single kinds of methods: layer sets, exit heads, draft models and lossy methods."""

from __future__ import annotations

import copy
import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from skipstone import AdaSD, Autoregressive
from skipstone.lab.bench.peers.hf import DraftAlone
from skipstone.lab.bench.plan import line_up
from skipstone.lab.bench.report import report
from skipstone.lab.bench.report.charts import along, by_threshold, matrix
from skipstone.lab.bench.report.tables import by_draft_model, by_exit_head, by_layer_set, learnt, likelihood, rates, tallies
from skipstone.lab.timing.measure import MethodBackend, growth, measure, options_for
from tests.helpers.machine import llama, near, prompt
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
        for label in settings:
            line["rows"][label] = {**layerskip, "known": {"exits": EXITS}, "grown": {"exits": EXITS}}
    return found


def settings(**changes: Any) -> dict[str, dict[str, Any]]:
    return {
        label: {
            **{"heads": "mine", "guard": False, "confidence_threshold": threshold, "num_speculative_tokens": 5},
            **{"recheck": False, **changes},
        }
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
    for number, change in enumerate(({"guard": True}, {"num_speculative_tokens": 2}, {"recheck": True})):
        changed = settings()
        changed["c"] |= change
        (group,) = report.load([written(tmp_path / f"{number}.jsonl", early(changed))])[1]
        assert by_threshold(group) == {}, change
    changed = settings()
    changed["c"]["heads"] = "others"
    assert by_threshold(report.load([written(tmp_path / "z.jsonl", early(changed))])[1][0]) == {}


def test_a_file_with_older_names_of_settings_says_the_same(tmp_path: Path) -> None:
    older = {"confidence_threshold": "threshold", "num_speculative_tokens": "max_pending"}
    renamed = {label: {older.get(key, key): value for key, value in own.items()} for label, own in settings().items()}
    (now,), (then,) = (
        report.load([written(tmp_path / f"{number}.jsonl", early(own))])[1] for number, own in enumerate((settings(), renamed))
    )
    assert by_threshold(then) == by_threshold(now) != {}
    assert by_exit_head(then) == by_exit_head(now)


def test_runs_without_exit_heads_have_no_such_table(tmp_path: Path) -> None:
    _, (group,) = report.load([written(tmp_path / "a.jsonl", lines())])
    assert not by_exit_head(group).rows
    assert by_threshold(group) == {}


MEANS = {
    "distance_accepted": {"sum": 3.0, "count": 20},
    "distance_rejected": {"sum": 4.9, "count": 10},
    "distance_threshold": {"sum": 0.0, "count": 0},
}


def adasd() -> list[dict[str, Any]]:
    """The run of tests/helpers/results.py with AdaSD in the place of LayerSkip: 303 tokens, 15 of them overruled."""
    found = copy.deepcopy(lines())
    found[0]["methods"]["adasd"] = {
        **found[0]["methods"].pop("layerskip"),
        "method": "adasd",
        "settings": {},
        "lossless": False,
    }
    found = [line for line in found if line["kind"] != "tuned"]
    for line in (line for line in found if "rows" in line):
        own = line["rows"]["adasd"] = {**line["rows"].pop("layerskip"), "grown": {"means": MEANS}, "log_likelihood": -202.0}
        own["stats"] = {**own["stats"], "overruled": 5}
        for name in ("autoregressive", "hf-generate"):
            line["rows"][name]["log_likelihood"] = -101.0
    return found


def test_what_drafts_cost_stands_beside_the_speed(tmp_path: Path) -> None:
    _, (group,) = report.load([written(tmp_path / "a.jsonl", adasd())])
    assert group.over_all("adasd")["means"] == {
        "distance_accepted": pytest.approx(0.15),
        "distance_rejected": pytest.approx(0.49),
    }
    assert likelihood(group, "adasd") == pytest.approx(-2.0)
    table = by_draft_model(group)
    shown = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert set(shown) == {"autoregressive", "hf-generate", "adasd (lossy)"}
    own = shown["adasd (lossy)"]
    assert (own["JSD accepted"], own["JSD rejected"], own["threshold"]) == ("0.150", "0.490", "-")
    assert (own["#cand"], own["#match"], own["AccRate"]) == ("2.00", "1.00", "0.500"), "100 and 50 in 50 steps"
    assert float(own["tokens/s"]) > float(shown["autoregressive"]["tokens/s"]) > 0
    assert (own["overruled"], own["log-likelihood"], own["score"]) == ("5.0 %", "-2.000", "exact_match 0.333")
    assert shown["autoregressive"]["log-likelihood"] == "-1.000"
    assert "drafts, and what keeping them costs" in report.report([tmp_path / "a.jsonl"], "md")


def test_adasds_layout_compares_with_drafts_of_one_length(tmp_path: Path) -> None:
    """A schedule that varies comes first in the plan, in half the time of plain decoding; the constant one takes twice that."""
    found = adasd()
    common = {**found[0]["methods"]["adasd"], "method": "speculative", "lossless": True}
    found[0]["methods"]["sure"] = {**common, "settings": {"schedule": "confidence"}}
    found[0]["methods"]["three drafts"] = {**common, "settings": {"num_speculative_tokens": 3}}
    found[0]["methods"]["vanilla"] = {**common, "settings": {}}
    for line in (line for line in found if "rows" in line):
        rows = line["rows"]
        for label, factor in (("sure", 0.5), ("three drafts", 1.0), ("vanilla", 2.0)):
            rows[label] = {**rows["autoregressive"], "seconds": factor * rows["autoregressive"]["seconds"]}
        rows["adasd"]["grown"] = {"means": {**MEANS, "distance_threshold": {"sum": 6.2, "count": 20}}}
    text = report.report([written(tmp_path / "a.jsonl", found)], "csv", "adasd")
    columns, *rows = csv.reader(io.StringIO(text))
    table = {row[1]: dict(zip(columns, row, strict=True)) for row in rows}  # behind the table's title
    name = next(column for column in table["vanilla"] if column.endswith("speedup")).removesuffix("speedup")
    assert table["vanilla"][f"{name}speedup"] == "1.000"
    assert table["autoregressive"][f"{name}speedup"] == "2.000"
    assert table["sure"][f"{name}speedup"] == "4.000"
    assert table["adasd (lossy)"][f"{name}JSDist"] == "0.310"
    assert table["vanilla"][f"{name}JSDist"] == "-"


def test_a_run_of_lossless_methods_has_no_such_table(tmp_path: Path) -> None:
    _, (group,) = report.load([written(tmp_path / "a.jsonl", lines())])
    assert by_draft_model(group).rows == []
    assert likelihood(group, "layerskip") is None


def test_sums_grow_as_counts_do() -> None:
    before = {"means": {"a": {"sum": 1.5, "count": 2}}, "threshold": 0.3}
    after = {"means": {"a": {"sum": 4.0, "count": 7}, "b": {"sum": 1.0, "count": 1}}, "threshold": 0.4}
    assert growth(before, after) == {"means": {"a": {"sum": 2.5, "count": 5}, "b": {"sum": 1.0, "count": 1}}}


def test_a_draft_model_alone_says_what_it_says_alone() -> None:
    model = llama()
    helper = near(model, 0.3)
    plain, options = MethodBackend(Autoregressive()), options_for(30)
    found = measure(model, DraftAlone(helper), prompt(9), options, 0)  # type: ignore[arg-type]
    assert found.tokens == measure(helper, plain, prompt(9), options, 0).tokens
    assert found.tokens != measure(model, plain, prompt(9), options, 0).tokens
    wishes = [{"method": "autoregressive"}, {"method": "draft-alone", "draft_model": helper}]
    entered, _ = line_up(wishes, model, False)
    assert [one.lossless for one in entered] == [True, False]


def test_what_a_call_adds_to_adasds_means_is_its_own() -> None:
    model = llama()
    method = AdaSD(near(model, 0.12))
    first, second = (measure(model, MethodBackend(method), prompt(n, n), options_for(40), 0) for n in (9, 5))
    assert first.grown is not None
    assert second.grown is not None
    both = method.report(model)["means"]["distance_accepted"]
    parts = [one.grown["means"]["distance_accepted"] for one in (first, second)]
    assert sum(part["count"] for part in parts) == both["count"] > 10
    assert sum(part["sum"] for part in parts) == pytest.approx(both["sum"])
