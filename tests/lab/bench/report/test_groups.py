"""Figures, tables, pages and comparisons out of lines made by hand."""

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
from skipstone.lab.bench.report import aggregate as figures
from skipstone.lab.bench.report import compare, report, tables
from skipstone.lab.bench.report.aggregate import expectation, groups, own_figures
from skipstone.lab.bench.run_file import RunFile
from tests.helpers.results import lines, row, stats, written


@pytest.fixture
def results(tmp_path: Path) -> Path:
    return written(tmp_path / "a.jsonl", lines())


def test_figures_by_hand(results: Path) -> None:
    (group,) = groups(report.load([results])[0])
    assert group.labels == ["hf-generate", "autoregressive", "layerskip"]
    assert [line["index"] for line in group.headline()] == [0, 1], "where one method loops, the prompt is not the headline's"
    own = group.figures("layerskip", group.lines)
    assert own is not None
    assert own["tokens_per_second"] == pytest.approx(101 / 0.55)
    assert own["share_of_ceiling"] == pytest.approx(101 / 0.55 / 400)
    assert own["speedups"]["autoregressive"] == pytest.approx({"value": 2, "low": 2, "high": 2})
    assert own["speedups"]["hf-generate"]["value"] == pytest.approx(1.25 / 0.55)
    assert own["equal"] == {"autoregressive": 2, "hf-generate": 2}
    assert (own["ttft_ms"], own["tpot_ms"]) == (pytest.approx(100), pytest.approx(1000 * 0.45 / 100))
    assert (own["mean_acceptance_length"], own["acceptance_rate"]) == (2.0, 0.5)
    assert own["draft_ms_per_step"] == pytest.approx(3.0)
    assert own["untimed_share"] == pytest.approx(1 - 0.51 / 0.55)
    assert own["tokens_per_step"] == pytest.approx(2.0)
    assert own["plain_ms_per_token"] == pytest.approx(10.0)
    assert own["predicted_speedup"] == pytest.approx(0.01 * 2 / (0.4 / 50))
    assert own["decode_speedup"] == pytest.approx(1.0 / 0.45)
    assert own["scores"] == {"exact_match": pytest.approx(1 / 3)}
    assert own["peak_memory"] == 1 << 20
    assert own["repeated_share"] == pytest.approx(0.3)
    assert group.figures("hf-early-exit", group.lines) is None


def test_several_samples_are_pass_at_k() -> None:
    rows = [row(1, 1, "a", scores=[{"pass": 1.0}, {"pass": 0.0}]), row(1, 1, "b", scores=[{"pass": 0.0}, {"pass": 0.0}])]
    assert figures._scores(rows) == {"pass@1": 0.25, "pass@2": 0.5}


def test_own_costs_predict_with_the_prefill_apart() -> None:
    summary = stats(101, 40, 60, 80, prefill=0.2, draft=0.2, score=0.3, other=0.1)
    total = Stats.from_summary(summary)
    own = own_figures(total, 0.85)
    assert own_figures(total, 0.85, setup=0.04)["untimed_share"] == pytest.approx((0.85 - 0.84) / 0.85)
    assert own["draft_ms_per_step"] == pytest.approx(5.0)
    assert own["score_ms_per_step"] == pytest.approx(7.5)
    assert own["other_ms_per_step"] == pytest.approx(2.5)
    assert own["untimed_share"] == pytest.approx((0.85 - 0.8) / 0.85)
    plain = [row(101, 1.5, "a", stats(101, 100, prefill=0.5, score=0.9))]
    found = expectation(total, [row(101, 0.85, "a", summary)], plain)
    assert found["plain_ms_per_token"] == pytest.approx(10.0)  # (1.5 - .5) / 100: everything but the prefill
    assert found["tokens_per_step"] == pytest.approx(2.5)
    assert found["predicted_speedup"] == pytest.approx(0.01 * 2.5 / (0.5 / 40))
    assert found["decode_speedup"] == pytest.approx(1.0 / 0.65)


def test_statistics_of_several_calls_are_pooled() -> None:
    def call(accepted: int) -> Stats:
        one, origin = Stats(), ["draft"] * accepted + ["bonus"]
        one.add(Step([[5] * (accepted + 1)], [origin], [4], [4], [accepted], [0], seconds_draft=0.5))
        return one

    total = Stats.total([call(0), call(4), call(4)])
    assert (total.tokens, total.accepted, total.draft_steps, total.turns) == (11, 8, 12, 3)
    assert dict(total.histogram) == {0: 1, 4: 2}
    assert total.seconds_draft == 1.5
    assert Stats.from_summary(total.summary()) == total


def test_the_reports_say_the_same_in_every_format(results: Path) -> None:
    text = report.report([results], "md")
    assert text.startswith(
        "m, float32, cpu: 10.0 GB/s of memory allow plain decoding at most 400 tokens/s.\n\n### m, sums, greedy\n"
    )
    lines_ = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0].strip("| ") for line in lines_] == [
        "method",
        "---",
        "hf-generate",
        "autoregressive",
        "layerskip",
    ]
    assert len({line.count(" | ") for line in lines_}) == 1
    assert "hf-early-exit: no row, it cannot." in text
    assert "exit_layer=2 (best of 2, 4 calls)" in text
    rows = list(csv.DictReader(io.StringIO(report.report([results], "csv"))))
    assert [(one["method"], one["prompts_taken"], one["prompts"]) for one in rows] == [
        (name, taken, count)
        for name in ("hf-generate", "autoregressive", "layerskip")
        for taken, count in (("headline", "2"), ("all", "3"))
    ]
    document = json.loads(report.report([results], "json"))
    own = document["groups"][0]["methods"]["layerskip"]
    assert own["headline"]["prompts"] == 2
    assert float(rows[4]["tokens_per_second"]) == own["headline"]["tokens_per_second"]
    assert float(rows[4]["speedups.autoregressive.value"]) == pytest.approx(2)
    assert rows[0]["acceptance_rate"] == "", "what a row has not is empty"
    shown = dict(zip(*([cell.strip() for cell in line.strip("|").split("|")] for line in (lines_[0], lines_[4])), strict=True))
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
    assert [path.name for path in written] == [
        "sums-speed-up-over-plain-decoding.svg",
        "sums-tokens-a-step.svg",
        "sums-where-a-step-s-time-goes.svg",
        "sums-speed-against-settings.svg",
    ]
    page = report.report([results], "html")
    assert all(path.read_text().strip() in page for path in written), "the same figures make the same bytes"
    assert "layerskip</text>" in written[0].read_text()
    assert len(set(report.pictures([results] * 3, tmp_path / "to"))) == 12


def test_texts_in_a_page_are_escaped(tmp_path: Path) -> None:
    found = lines()
    for line in found:
        if "task" in line:
            line["task"] = "<script>alert(1)</script>"
    page = report.report([written(tmp_path / "x.jsonl", found)], "html")
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("layout", tables.LAYOUTS)
def test_every_layout_has_a_row_a_method(results: Path, layout: str) -> None:
    _, found = report.load([results])
    for table in tables.tables(found, layout):
        assert [one[0] for one in table.rows] == ["hf-generate", "autoregressive", "layerskip"]
        assert {len(one) for one in table.rows} == {len(table.columns)}
        own = dict(zip(table.columns, table.rows[2], strict=True))
        assert any(value.startswith("2.00") for value in own.values()), own
        assert "183.6" in " ".join(own.values()), "tokens a second"


def test_categories_have_rows_of_their_own(tmp_path: Path) -> None:
    """The looping prompt is the only one of its category: no headline there, all prompts beside it."""
    found = lines()
    for line, name in zip(found[2:], ["writing", "maths", "qa"], strict=True):
        line["category"] = name
    found[3]["rows"]["layerskip"]["seconds"] = 1.1
    out = written(tmp_path / "a.jsonl", found)
    _, table = tables.tables(report.load([out])[1])
    assert table.columns[:4] == ["category", "n", "hf-generate", "layerskip"]
    assert [[one[0], one[1], one[3], one[4], one[6]] for one in table.rows] == [
        ["maths", "1", "1.00", "1", "1.00"],
        ["qa", "0", "-", "1", "2.00"],
        ["writing", "1", "2.00", "1", "2.00"],
    ]
    document = json.loads(report.report([out], "json"))["groups"][0]["categories"]
    assert document["maths"]["layerskip"]["headline"]["speedups"]["autoregressive"]["value"] == pytest.approx(1)


def test_what_a_paper_leaves_open_is_said(tmp_path: Path) -> None:
    provenance = {"argv": ["x"], "packages": {}, "cpu": "c", "threads": 2, "git": None}
    tasks = [{"task": "gsm8k", "protocol": "swift"}, {"task": "humaneval", "protocol": None}]
    for protocol, wanted in ((None, 1), ("adasd", 2)):
        path = tmp_path / f"{protocol}.jsonl"
        with RunFile(path, {"seed": 0, "tasks": tasks, "protocol": protocol}, provenance) as file:
            for line in lines():
                file.add(line)
        text = report.report([path], "md")
        assert "gsm8k as swift asks it; not stated there and ours: the wording of the prompt, and" in text
        assert text.count("not stated there") == wanted


def test_across_tasks_it_is_said_where_every_prompt_loops(tmp_path: Path) -> None:
    found = lines()
    for line in found:
        if line["kind"] == "prompt":
            line["rows"]["layerskip"]["repeated_share"] = 0.9
    (table,) = tables.tables(report.load([written(tmp_path / "a.jsonl", found)])[1], "tasks")
    assert table.columns[2] == "sums x plain (all 3, every one loops)"
    assert table.rows[2][1:] == ["183.6", "2.00"]


def test_layouts_are_those_of_the_papers(results: Path) -> None:
    _, found = report.load([results])
    (theirs,) = tables.tables(found, "layerskip")
    assert theirs.rows[2] == ["layerskip", "2", "-", "exact_match 0.500", "50.0%", "183.6", "5.4", "2.00x"]
    (tasks,) = tables.tables(found, "tasks")
    assert tasks.columns == ["Methods", "sums tokens/s", "sums x plain (n = 2)"]
    assert tasks.rows[2] == ["layerskip", "183.6", "2.00"]
    (swift,) = tables.tables(found, "swift")
    assert swift.columns == [
        "Methods",
        "sums M",
        "sums alpha",
        "sums Acc.",
        "sums Speedup",
        "Speed (tokens/s)",
        "Overall Speedup",
    ]
    assert swift.rows[2][-2:] == ["183.64", "2.00x"]
    (adadecode,) = tables.tables(found, "adadecode")
    assert adadecode.rows[2] == ["layerskip", "183.6", "2.00x", "0.500"]
    (adasd,) = tables.tables(found, "adasd")
    assert adasd.rows[2] == ["layerskip", "183.636", "-", "exact_match 0.500", "2.000", "1.000", "0.500", "-"]
    with pytest.raises(ValueError, match="unknown layout 'medusa'"):
        tables.tables(found, "medusa")


def test_a_file_without_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no measured prompt yet"):
        report.load([written(tmp_path / "empty.jsonl", lines()[:2])])


def test_synthetic_and_lossy_are_said_everywhere(tmp_path: Path) -> None:
    found = lines()
    found[0]["synthetic"] = {
        "shape": "s",
        "exit_layer": 2,
        "agreement": 0.8,
        "realised_agreement": {"value": 0.81, "low": 0.8, "high": 0.82},
    }
    found[0]["methods"]["layerskip"]["lossless"] = False
    found[2]["category"], found[3]["category"] = "a", "b"
    path = written(tmp_path / "a.jsonl", found)
    for form in ("md", "csv", "html"):
        for layout in tables.LAYOUTS:
            text = report.report([path], form, layout)
            assert "SYNTHETIC" in text, (form, layout)
            assert "layerskip (lossy)" in text, (form, layout)
    for table in tables.tables(report.load([path])[1]):
        assert table.title.startswith("SYNTHETIC MODEL")
    assert "agree with all at 0.810 (0.800-0.820) on fresh contexts; 0.8 was wanted" in report.report([path], "md")
    for picture in report.pictures([path], tmp_path / "to"):
        assert picture.name.startswith("synthetic-model-m-")
        assert "SYNTHETIC MODEL: m" in picture.read_text()
    text = compare.table(compare.compare(path, path), 0.05).markdown()
    assert "SYNTHETIC" in text
    assert "layerskip (lossy)" in text


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda found: found.pop(0), "line 3 is damaged: nothing was said about the model 'm'"),
        (lambda found: found.append([1, 2]), "line 7 is damaged: expected an object with a kind"),
        (lambda found: found[2].pop("digest"), "line 4 is damaged: a line of kind prompt says 'digest', this one does not"),
        (lambda found: found[2]["rows"]["layerskip"].pop("tokens"), "line 4 is damaged: the row layerskip has no 'tokens'"),
        (lambda found: found[2]["rows"]["layerskip"].update(seconds=0), "the row layerskip took 0 seconds"),
        (
            lambda found: found[2]["rows"].update(x=found[2]["rows"]["layerskip"]),
            "nothing was said about the method 'x' before",
        ),
    ],
)
def test_damaged_results_are_one_sentence(tmp_path: Path, damage: Any, said: str) -> None:
    found = lines()
    damage(found)
    with pytest.raises(ValueError, match=said):
        report.load([written(tmp_path / "a.jsonl", found)])


def test_a_task_greedy_and_sampled_has_columns_and_totals_of_its_own(tmp_path: Path) -> None:
    found = lines()
    sampled = [{**line, "number": 1, "temperature": 0.8} for line in lines()[2:]]
    (table,) = tables.tables(report.load([written(tmp_path / "a.jsonl", [*found, *sampled])])[1], "swift")
    assert len(set(table.columns)) == len(table.columns) == 13
    assert "sums, T = 0.8 M" in table.columns
    assert table.columns[-1] == "Overall Speedup, T = 0.8"


def test_prompts_that_were_cut_are_counted(tmp_path: Path) -> None:
    found = lines()
    found[2]["cut"] = found[3]["cut"] = 1
    assert "m, sums: 2 prompts lost their beginning" in report.report([written(tmp_path / "a.jsonl", found)], "md")
