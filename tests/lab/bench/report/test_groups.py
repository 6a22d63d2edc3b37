"""Figures, tables, pages and notes of runs made by hand."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from skipstone.decoding.draft import Step
from skipstone.decoding.stats import Stats
from skipstone.lab.bench.report import compare, report, tables
from skipstone.lab.bench.report.aggregate import groups, predict_speedup, step_figures
from skipstone.lab.bench.run_file import RunFile
from tests.helpers.results import lines, row, stats, written


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return written(tmp_path / "a.jsonl", lines())


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
        "decode_speedup": 1.0 / 0.45,
        "peak_memory": 1 << 20,
        "repeated_share": 0.3,
    }
    assert {name: own[name] for name in expected} == pytest.approx(expected)
    assert own["speedups"]["autoregressive"] == pytest.approx({"value": 2, "low": 2, "high": 2})
    assert own["speedups"]["hf-generate"]["value"] == pytest.approx(1.25 / 0.55)
    assert own["equal"] == {"autoregressive": 2, "hf-generate": 2}
    assert own["scores"] == {"exact_match": pytest.approx(1 / 3)}
    assert group.figures("hf-early-exit", group.lines) is None


def test_own_costs_predict_the_speedup_without_the_prefill() -> None:
    summary = stats(101, 40, 60, 80, prefill=0.2, draft=0.2, score=0.3, other=0.1)
    total = Stats.from_summary(summary)
    own = step_figures(total, 0.85)
    assert [own[f"{part}_ms_per_step"] for part in ("draft", "score", "other")] == pytest.approx([5.0, 7.5, 2.5])
    assert own["untimed_share"] == pytest.approx((0.85 - 0.8) / 0.85)
    assert step_figures(total, 0.85, setup=0.04)["untimed_share"] == pytest.approx((0.85 - 0.84) / 0.85)
    plain = [row(101, 1.5, "a", stats(101, 100, prefill=0.5, score=0.9))]
    found = predict_speedup(total, [row(101, 0.85, "a", summary)], plain)
    assert found["plain_ms_per_token"] == pytest.approx(10.0)  # (1.5 - .5) / 100: everything but the prefill
    assert found["tokens_per_step"] == pytest.approx(2.5)
    assert found["predicted_speedup"] == pytest.approx(0.01 * 2.5 / (0.5 / 40))
    assert found["decode_speedup"] == pytest.approx(1.0 / 0.65)


def test_statistics_of_several_calls_are_pooled() -> None:
    calls = [Stats(), Stats(), Stats()]
    for one, accepted in zip(calls, (0, 4, 4), strict=True):
        origin = ["draft"] * accepted + ["bonus"]
        one.add(Step([[5] * (accepted + 1)], [origin], [4], [4], [accepted], [0], seconds_draft=0.5))
    total = Stats.total(calls)
    assert (total.tokens, total.accepted, total.draft_steps, total.turns, total.seconds_draft) == (11, 8, 12, 3, 1.5)
    assert dict(total.histogram) == {0: 1, 4: 2}
    assert Stats.from_summary(total.summary()) == total


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


def test_pictures_are_those_of_the_page(results: Path, tmp_path: Path) -> None:
    written = report.pictures([results], tmp_path / "to")
    titles = ("speed-up-over-plain-decoding", "tokens-a-step", "where-a-step-s-time-goes", "speed-against-settings")
    assert [path.name for path in written] == [f"sums-{title}.svg" for title in titles]
    page = report.report([results], "html")
    assert all(path.read_text().strip() in page for path in written), "the same figures make the same bytes"
    assert "layerskip</text>" in written[0].read_text()


def test_texts_in_a_page_are_escaped(tmp_path: Path) -> None:
    found = lines()
    for line in (line for line in found if "task" in line):
        line["task"] = "<script>alert(1)</script>"
    page = report.report([written(tmp_path / "x.jsonl", found)], "html")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize(
    ("layout", "columns", "cells"),
    [
        ("own", ["n", "tokens/s", "x plain"], ["2", "183.6", "2.00"]),
        (
            "swift",
            ["sums M", "sums alpha", "sums Acc.", "sums Speedup", "Speed (tokens/s)", "Overall Speedup"],
            ["2.00", "0.50", "exact_match 0.500", "2.00x", "183.64", "2.00x"],
        ),
        (
            "adasd",
            ["sums tks/sec", "sums JSDist", "sums acc", "sums #cand", "sums #match", "sums AccRate", "sums speedup"],
            ["183.636", "-", "exact_match 0.500", "2.000", "1.000", "0.500", "-"],
        ),
    ],
)
def test_layouts_are_those_of_the_papers(results: Path, layout: str, columns: list[str], cells: list[str]) -> None:
    (table,) = tables.tables(report.load([results])[1], layout)
    assert [*table.columns][1 : 1 + len(columns)] == columns
    assert [row[0] for row in table.rows] == ["hf-generate", "autoregressive", "layerskip"]
    assert table.rows[2][1 : 1 + len(cells)] == cells
    with pytest.raises(ValueError, match="unknown layout 'medusa'"):
        tables.tables([], "medusa")


def test_layouts_across_tasks_keep_temperatures_apart_and_mark_looping_tasks(tmp_path: Path) -> None:
    found = lines()
    sampled = [{**line, "number": 1, "temperature": 0.8} for line in lines()[2:]]
    (table,) = tables.tables(report.load([written(tmp_path / "a.jsonl", [*found, *sampled])])[1], "swift")
    assert len(set(table.columns)) == len(table.columns) == 13
    assert "sums, T = 0.8 M" in table.columns
    assert table.columns[-1] == "Overall Speedup, T = 0.8"
    for line in found[2:]:
        line["rows"]["layerskip"]["repeated_share"] = 0.9
    (table,) = tables.tables(report.load([written(tmp_path / "b.jsonl", found)])[1], "tasks")
    assert table.columns[2] == "sums x plain (all 3, every one loops)"
    assert table.rows[2][1:] == ["183.6", "2.00"]


@pytest.mark.parametrize(("protocol", "notes"), [(None, 1), ("adasd", 2)])
def test_notes_name_our_choices_and_cut_prompts(tmp_path: Path, protocol: str | None, notes: int) -> None:
    provenance = {"argv": ["x"], "packages": {}, "cpu": "c", "threads": 2, "git": None}
    tasks = [{"task": "gsm8k", "protocol": "swift"}, {"task": "humaneval", "protocol": None}]
    found = lines()
    found[2]["cut"] = found[3]["cut"] = 1
    with RunFile(tmp_path / "a.jsonl", {"seed": 0, "tasks": tasks, "protocol": protocol}, provenance) as file:
        file.add(*found)
    text = report.report([tmp_path / "a.jsonl"], "md")
    assert "gsm8k as swift asks it; not stated there and ours: the wording of the prompt, and" in text
    assert text.count("not stated there") == notes
    assert "m, sums: 2 prompts lost their beginning" in text


def test_synthetic_and_lossy_are_said_everywhere(tmp_path: Path) -> None:
    found = lines()
    realised = {"value": 0.81, "low": 0.8, "high": 0.82}
    found[0]["synthetic"] = {"shape": "s", "exit_layer": 2, "agreement": 0.8, "realised_agreement": realised}
    found[0]["methods"]["layerskip"]["lossless"] = False
    found[2]["category"], found[3]["category"] = "a", "b"
    path = written(tmp_path / "a.jsonl", found)
    texts = [report.report([path], form, layout) for form in ("md", "csv") for layout in tables.LAYOUTS]
    texts.append(report.report([path], "html"))
    texts.append(compare.table(compare.compare(path, path), 0.05).markdown())
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
