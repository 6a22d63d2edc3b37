"""Tables and pictures of layer sets, exit heads, draft models and lossy methods."""

from pathlib import Path
from typing import Any

import pytest

from skipstone import Autoregressive
from skipstone.lab.bench.peers.hf import DraftAlone
from skipstone.lab.bench.plan import create_entries
from skipstone.lab.bench.report import report, tables
from skipstone.lab.bench.report.aggregate import MeasurementGroup
from skipstone.lab.bench.report.charts import by_threshold
from skipstone.lab.timing.measure import MethodBackend, measure, options_for
from tests.helpers.machine import llama, near, prompt
from tests.helpers.results import lines, written

HISTORY = [
    {"evaluation": 0, "tokens": 0.0, "matchness": None, "attention": [1], "mlp": [2]},
    {"evaluation": 7, "tokens": 90.0, "matchness": 0.9, "attention": [1, 2], "mlp": []},
]
KNOWN = {"skip_ratio": 0.5, "skipped": {"attention": [1, 2], "mlp": []}, "matchness": 0.9, "evaluations": 9, "history": HISTORY}
EXITS = {
    "6": {"tests": 40, "predicted": 20, "accepted": 12, "rejected": 4},
    "12": {"tests": 20, "predicted": 10, "accepted": 8, "rejected": 0},
}
MEANS = {
    "distance_accepted": {"sum": 3.0, "count": 20},
    "distance_rejected": {"sum": 4.9, "count": 10},
    "distance_threshold": {"sum": 0.0, "count": 0},
}


def group_of(path: Path, found: list[dict[str, Any]]) -> MeasurementGroup:
    return report.load([written(path, found)])[1][0]


def cells_of(table: tables.Table) -> dict[str, dict[str, str]]:
    return {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}


def replaced(methods: dict[str, dict[str, Any]], rows: dict[str, Any]) -> list[dict[str, Any]]:
    """The run of tests/helpers/results.py with other methods in the place of layerskip."""
    found = [line for line in lines() if line["kind"] != "tuned"]
    own = found[0]["methods"].pop("layerskip")
    found[0]["methods"] |= {label: {**own, **about} for label, about in methods.items()}
    for line in (line for line in found if "rows" in line):
        layerskip = line["rows"].pop("layerskip")
        line["rows"] |= {label: {**layerskip, **rows} for label in methods}
    return found


def swift() -> list[dict[str, Any]]:
    """The run of tests/helpers/results.py; layerskip reports a layer set and spends a fifth of its time in search."""
    found = lines()
    for line in (line for line in found if "rows" in line):
        row = line["rows"]["layerskip"]
        row["known"] = {**KNOWN, "matchness": 0.5 + 0.1 * line["index"]}
        row["stats"] |= {"seconds_search": 0.1025, "drafting": row["stats"]["steps"]}
    return found


def adadecode(**changes: Any) -> list[dict[str, Any]]:
    """AdaDecode with three thresholds. changes: of the settings of the last one."""
    common = {"heads": "mine", "guard": False, "num_speculative_tokens": 5, "recheck": False}
    settings = {label: {**common, "confidence_threshold": x} for label, x in (("a", 0.2), ("b", 0.75), ("c", 0.9))}
    settings["c"] |= changes
    methods = {label: {"method": "adadecode", "settings": one} for label, one in settings.items()}
    return replaced(methods, {"known": {"exits": EXITS}, "grown": {"exits": EXITS}})


def adasd() -> list[dict[str, Any]]:
    """AdaSD: 303 tokens, 15 of them overruled; an answer is right that is wrong without it."""
    about = {"method": "adasd", "settings": {}, "lossless": False}
    found = replaced({"adasd": about}, {"grown": {"means": MEANS}})
    for line in (line for line in found if "rows" in line):
        for name, row in line["rows"].items():
            row["log_likelihood"] = -202.0 if name == "adasd" else -101.0
        line["rows"]["adasd"]["stats"]["overruled"] = 5
        line["rows"]["adasd"]["scores"] = [{"exact_match": float(line["index"] != 1)}]
    return found


def test_layer_sets_have_the_speedup_that_swifts_equation_expects(tmp_path: Path) -> None:
    """50 steps of 2 drafts, of which 1 is right: M = 2, alpha = .5. A plain token takes 10 ms, the two drafts 3 ms, scoring 5:
    c = .15, v = .5. E = 2 / (2 c + v), in the paper 2 / (2 c + 1)."""
    cells = cells_of(tables.by_layer_set(group_of(tmp_path / "a.jsonl", swift())))["layerskip"]
    assert [*cells.values()][1:11] == ["0.50", "2", "0.70", "9", "100%", "20.0%", "0.15", "0.50", "1.54", "2.50"]
    assert "sums: layer sets" in report.report([tmp_path / "a.jsonl"], "md")


def test_exit_heads_are_counted_over_the_groups_prompts(tmp_path: Path) -> None:
    """Three prompts of 101 tokens: 60 predictions accepted, 12 of 72 rejected."""
    group = group_of(tmp_path / "a.jsonl", adadecode())
    exits = {layer: {name: 3 * count for name, count in counts.items()} for layer, counts in EXITS.items()}
    expected = {"exits": exits, "share": pytest.approx(60 / 303), "rejected": pytest.approx(12 / 72)}
    assert group.over_all("a")["early_predictions"] == expected
    assert group.over_all("autoregressive")["early_predictions"] is None
    cells = cells_of(tables.by_exit_head(group))
    assert [*cells] == ["a", "b", "c"]
    assert [*cells["a"].values()][1:] == ["0.20", "20%", "17%", "6: 50% (25%), 12: 50% (0%)", "2/3", "2.22"]


def test_a_file_with_older_names_of_settings_gives_the_same_report(tmp_path: Path) -> None:
    older = {"confidence_threshold": "threshold", "num_speculative_tokens": "max_pending"}
    renamed = adadecode()
    for about in renamed[0]["methods"].values():
        about["settings"] = {older.get(key, key): value for key, value in about["settings"].items()}
    now, then = group_of(tmp_path / "a.jsonl", adadecode()), group_of(tmp_path / "b.jsonl", renamed)
    assert by_threshold(then) == by_threshold(now) != {}
    assert tables.by_exit_head(then) == tables.by_exit_head(now)


def test_lossy_methods_have_their_cost_next_to_their_speed(tmp_path: Path) -> None:
    group = group_of(tmp_path / "a.jsonl", adasd())
    cells = cells_of(tables.by_draft_model(group))
    assert [*cells] == ["hf-generate", "autoregressive", "adasd (lossy)"]
    names = ("#cand", "#match", "AccRate", "JSD accepted", "JSD rejected", "JSD threshold", "overruled", "log-likelihood")
    assert [cells["adasd (lossy)"][name] for name in names] == (
        ["2.00", "1.00", "0.500", "0.150", "0.490", "-", "5.0%", "-2.000"]
    )
    scores = [cells["adasd (lossy)"][name] for name in ("score", "score - plain")]
    assert scores == ["exact_match 0.667 (0.208-0.939)", "+0.333 (+0.000 to +1.000)"], "the change is prompt by prompt"
    assert cells["autoregressive"]["score - plain"] == "+0.000"
    assert cells["hf-generate"]["score - plain"] == "-", "it has no score"
    assert cells["autoregressive"]["log-likelihood"] == "-1.000"
    assert "drafts, and what keeping them costs" in report.report([tmp_path / "a.jsonl"], "md")


def test_a_draft_model_alone_gives_its_own_text() -> None:
    model = llama()
    helper = near(model, 0.3)
    plain, options = MethodBackend(Autoregressive()), options_for(30)
    found = measure(model, DraftAlone(helper), prompt(9), options, 0)  # type: ignore[arg-type]
    assert found.tokens == measure(helper, plain, prompt(9), options, 0).tokens
    assert found.tokens != measure(model, plain, prompt(9), options, 0).tokens
    wishes = [{"method": "autoregressive"}, {"method": "draft-alone", "draft_model": helper}]
    entered, _ = create_entries(wishes, model, False)
    assert [one.lossless for one in entered] == [True, False]
