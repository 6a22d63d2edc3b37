"""Figures, tables, pages and notes of runs made by hand, and comparisons of two runs."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scipy.stats

from skipstone.lab.bench.report import report, tables
from skipstone.lab.bench.report.aggregate import groups
from tests.helpers.results import lines, written


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return written(tmp_path / "a.jsonl", lines())


def test_an_exit_alone_that_loops_takes_no_prompt_from_the_headline(tmp_path: Path) -> None:
    found = lines()
    found[0]["methods"]["exit"] = found[0]["methods"]["layerskip"] | {"method": "early_exit", "lossless": False}
    for line in found:
        if line["kind"] == "prompt":
            line["rows"]["exit"] = line["rows"]["layerskip"] | {"repeated_share": 0.9}
    (group,) = groups(report.load([written(tmp_path / "a.jsonl", found)])[0])
    assert [line["index"] for line in group.headline()] == [0, 1]
    assert "exit" in group.labels


def test_figures_by_hand(results: Path) -> None:
    (group,) = groups(report.load([results])[0])
    assert group.labels == ["hf-generate", "autoregressive", "layerskip"]
    assert [line["index"] for line in group.headline()] == [0, 1], "a prompt on which one method loops is not the headline's"
    own = group.figures("layerskip", group.lines)
    assert own is not None
    expected = {
        "tokens_per_second": 101 / 0.55,
        "share_of_ceiling": 101 / 0.55 / 400,
        "ttft_ms": 100,
        "tpot_ms": 1000 * 0.45 / 100,
        "mean_acceptance_length": 2.0,
        "acceptance_rate": 0.5,
        "draft_ms_per_step": 3.0,
        "untimed_share": 1 - 0.51 / 0.55,
        "tokens_per_step": 2.0,
        "plain_ms_per_token": 10.0,
        "predicted_speedup": 0.01 * 2 / (0.4 / 50),
        "draft_step_cost": 0.15,
        "scoring_cost": 0.5,
        "paper_speedup": 2 / (2 * 0.15 + 1),
        "decode_speedup": 1.0 / 0.45,
        "peak_memory": 1 << 20,
        "repeated_share": 0.3,
    }
    assert {name: own[name] for name in expected} == pytest.approx(expected)
    assert own["speedups"]["autoregressive"] == pytest.approx({"value": 2, "low": 2, "high": 2})
    assert own["speedups"]["hf-generate"]["value"] == pytest.approx(1.25 / 0.55)
    assert own["equal"] == {"autoregressive": 2, "hf-generate": 2}
    wilson = scipy.stats.binomtest(1, 3).proportion_ci(0.95, "wilson")
    assert own["scores"] == {"exact_match": pytest.approx({"value": 1 / 3, "low": wilson.low, "high": wilson.high})}
    assert group.figures("hf-early-exit", group.lines) is None


def test_the_share_of_the_weights_is_a_mean_over_draft_steps() -> None:
    found = [{"kind": "run", "plan": {"seed": 0}}, *lines()]
    own = [line["rows"]["layerskip"] for line in found if "rows" in line]
    for row, share in zip(own, (0.2, None, 0.5), strict=True):
        row["weights_read"] = share
    own[2]["stats"]["draft_steps"] = 200
    (group,) = groups(found)
    assert group.over_all("layerskip")["weights_read"] == pytest.approx((0.2 * 100 + 0.5 * 200) / 300)
    own[0]["stats"]["draft_steps"] = own[2]["stats"]["draft_steps"] = 0
    assert group.over_all("layerskip")["weights_read"] is None


def test_the_reports_say_the_same_in_every_format(results: Path) -> None:
    text = report.report([results], "md")
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")]
    assert [row[0] for row in cells] == ["method", "---", "hf-generate", "autoregressive", "layerskip"]
    assert "hf-early-exit: no row, it cannot." in text
    rows = list(csv.DictReader(io.StringIO(report.report([results], "csv"))))
    names = ("hf-generate", "autoregressive", "layerskip")
    assert [(row["method"], row["prompts_taken"], row["prompts"]) for row in rows] == [
        (name, taken, count) for name in names for taken, count in (("headline", "2"), ("all", "3"))
    ]
    own = json.loads(report.report([results], "json"))["groups"][0]["methods"]["layerskip"]
    assert own["headline"]["prompts"] == 2
    assert float(rows[4]["tokens_per_second"]) == own["headline"]["tokens_per_second"]
    assert rows[0]["acceptance_rate"] == "", "a figure that a row does not have is empty"
    shown = dict(zip(cells[0], cells[4], strict=True))
    assert shown["tokens/s"] == f"{own['headline']['tokens_per_second']:.1f}"
    assert shown["x plain"] == shown["x plain, all"] == "2.00"
    page = report.report([results], "html")
    assert page.count("<svg") == 4
    assert all(cell in page for cell in shown.values())
    assert not re.search(r'(src|href)="?http', page), "nothing is loaded from anywhere"
    with pytest.raises(ValueError, match="unknown format 'pdf'; there are md"):
        report.report([results], "pdf")
    with pytest.raises(ValueError, match="unknown layout 'medusa'"):
        tables.tables([], "medusa")


def test_texts_in_a_page_are_escaped(tmp_path: Path) -> None:
    found = lines()
    for line in (line for line in found if "task" in line):
        line["task"] = "<script>alert(1)</script>"
    page = report.report([written(tmp_path / "x.jsonl", found)], "html")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_synthetic_and_lossy_are_said_everywhere(tmp_path: Path) -> None:
    found = lines()
    realised = {"value": 0.81, "low": 0.8, "high": 0.82}
    found[0]["synthetic"] = {"shape": "s", "exit_layer": 2, "agreement": 0.8, "realised_agreement": realised}
    found[0]["methods"]["layerskip"]["lossless"] = False
    found[2]["category"], found[3]["category"] = "a", "b"
    path = written(tmp_path / "a.jsonl", found)
    texts = [report.report([path], form, layout) for form in ("md", "csv") for layout in tables.LAYOUTS]
    texts.append(report.report([path], "html"))
    texts.append(report.table(report.compare(path, path), 0.05).markdown())
    for text in texts:
        assert "SYNTHETIC" in text
        assert "layerskip (lossy)" in text
    assert all(table.title.startswith("SYNTHETIC MODEL") for table in tables.tables(report.load([path])[1]))
    assert "agree with all at 0.810 (0.800-0.820) on fresh contexts; 0.8 was wanted" in texts[0]
    for picture in report.pictures([path], tmp_path / "to"):
        assert picture.name.startswith("synthetic-model-m-")
        assert "SYNTHETIC MODEL: m" in picture.read_text()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda found: found.pop(0), "line 3 is damaged: nothing was said about the model 'm'"),
        (lambda found: found.append([1, 2]), "line 7 is damaged: expected an object with a kind"),
        (lambda found: found[2].pop("digest"), "line 4 is damaged: a line of kind prompt says 'digest', this one does not"),
        (lambda found: found[2]["rows"]["layerskip"].pop("tokens"), "line 4 is damaged: the row layerskip has no 'tokens'"),
        (lambda found: found[2]["rows"]["layerskip"].update(seconds=0), "the row layerskip took 0 seconds"),
        (lambda found: found[2]["rows"].update(x=found[2]["rows"]["layerskip"]), "nothing was said about the method 'x'"),
        (lambda found: found.__delitem__(slice(2, None)), "holds no measured prompt yet"),
    ],
)
def test_damaged_and_empty_results_are_one_sentence(tmp_path: Path, damage: Any, said: str) -> None:
    found = lines()
    damage(found)
    with pytest.raises(ValueError, match=said):
        report.load([written(tmp_path / "a.jsonl", found)])


Change = Callable[[str, dict[str, Any]], None]  # of a label and its row


def changed(tmp_path: Path, change: Change, without: str = "") -> report.MethodChange:
    """layerskip in a second run with a change of every row. without: a method that neither run has."""
    before, after = lines(), lines()
    for line in (*before, *after):
        for part in ("rows", "methods"):
            line.get(part, {}).pop(without, None)
    for line in after:
        for name, row in line.get("rows", {}).items():
            change(name, row)
    changes = report.compare(written(tmp_path / "1.jsonl", before), written(tmp_path / "2.jsonl", after))
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
    assert ("SLOWER" in report.table([own], 0.05).markdown()) is slower


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
        report.compare(written(tmp_path / "a.jsonl", lines()), written(tmp_path / "b.jsonl", other))
