"""Pages that are written from stored results: tables, figures in sentences, pictures, and what a check finds."""

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.measure.heads_results import stored
from recipes.results import ROOT, changes
from skipstone.lab.bench import records
from skipstone.lab.bench.records import Record, baseline, rounded, speedup
from skipstone.methods.adadecode.heads import HeadsCard

FILES = sorted((ROOT / "docs" / "lab" / "results").glob("*.jsonl"))
STORED = [path for path in FILES if not path.stem.startswith("start-")]
MAX_BYTES = 2_000_000


def record(label: str, seconds: list[float], task: str = "sums", temperature: float = 0.0, **more: Any) -> Record:
    """A record of two prompts of 100 tokens."""
    total = sum(seconds)
    ratio = dict.fromkeys(("value", "low", "high"), 4.0 / total)
    figures = {"prompts": 2, "tokens_per_second": 200 / total, "speedups": {"autoregressive": ratio}, "acceptance_rate": 0.5}
    method = {"method": label.partition(",")[0], "label": label, "lossless": not label.startswith("adasd")}
    usual = {
        **dict.fromkeys(records.KEYS),
        "model": "m",
        "weights": "w",
        "task": task,
        "temperature": temperature,
        "settings": {},
    }
    usual |= {"places": [1, 2], "left_out": 3, "tokens": [100, 100], "seconds": seconds, "figures": figures, **method}
    return {**usual, "plan": {"seed": 0}, "categories": ["a", "b"], **more}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with stored results and no page."""
    rows = [record("autoregressive", [2.0, 2.0]), record("swift, paper", [1.0, 1.5]), record("adasd", [4.0, 4.0])]
    rows += [record("autoregressive", [2.0, 2.0], temperature=1.0), record("swift, paper", [2.0, 2.0], temperature=1.0)]
    records.write(tmp_path / "docs" / "lab" / "results" / "tiny.jsonl", rows)
    return tmp_path


def rendered(root: Path, page: str) -> str:
    (root / "README.md").write_text(page)
    for path, content in changes(root):
        path.write_text(content)
    assert not [*changes(root)], "a page that was written differs no more"
    return (root / "README.md").read_text()


def test_a_table_has_a_row_for_each_method(root: Path) -> None:
    page = "a\n\n<!-- results tiny sums: tokens/s, x plain, M -->\n| old |\n\nb\n"
    empty = page.replace("| old |\n", "")
    assert rendered(root, empty) == rendered(root, page), "a page that has no table yet"
    assert rendered(root, page).splitlines()[2:-2] == [
        "<!-- results tiny sums: tokens/s, x plain, M -->",
        "| method | tokens/s | x plain | M |",
        "| --- | --- | --- | --- |",
        "| autoregressive | 50.0 | 1.00 | - |",
        "| swift, paper | 80.0 | 1.60 | - |",
        "| adasd (lossy) | 25.0 | 0.50 | - |",
    ]


def test_a_table_of_several_tasks_shows_chosen_rows_under_other_names(root: Path) -> None:
    page = "<!-- results tiny sums sums@1: x; adasd => [AdaSD](adasd.md); swift, paper -->\n"
    assert rendered(root, page).splitlines()[1:] == [
        "| method | sums, x | sums, T = 1, x |",
        "| --- | --- | --- |",
        "| [AdaSD](adasd.md) (lossy) | 0.50 | - |",
        "| swift, paper | 1.60 | 1.00 |",
    ]


def test_categories_have_the_speed_up_of_their_own_prompts(root: Path) -> None:
    page = "<!-- categories tiny sums: swift, paper; adasd -->\n"
    assert rendered(root, page).splitlines()[1:] == [
        "| category | n | swift, paper | adasd |",
        "| --- | --- | --- | --- |",
        "| a | 1 | 2.00 | 0.50 |",
        "| b | 1 | 1.33 | 0.50 |",
    ]


def test_models_of_one_run_have_a_mean_and_a_range(root: Path) -> None:
    rows = [record("autoregressive", [2.0, 2.0], model=name, weights=name) for name in "abc"]
    rows += [
        record("swift, paper", [each, each], model=name, weights=name) for name, each in zip("abc", (1, 2, 1), strict=True)
    ]
    records.write(root / "docs" / "lab" / "results" / "seeds.jsonl", rows)
    shown = rendered(root, "<!-- models seeds sums: x, tokens/s, M; swift, paper => ours -->\n").splitlines()
    assert shown[-1] == "| ours | 1.67 (1.00-2.00) | 83.3 (50.0-100.0) | - |"
    link = '(page.md "x of seeds sums: swift, paper; autoregressive")'
    assert rendered(root, f"[?]{link}") == f"[1.67 (1.00-2.00); 1.00 (1.00-1.00)]{link}"


def test_a_mean_is_over_figures_and_not_over_digits_of_a_name(root: Path) -> None:
    rows = [record("autoregressive", [2.0, 2.0], model=name, weights=name) for name in "ab"]
    for row, value in zip(rows, (0.25, 0.75), strict=True):
        row["figures"] |= {"scores": {"pass@1": {"value": value, "low": 0.0, "high": 1.0}}}
    records.write(root / "docs" / "lab" / "results" / "seeds.jsonl", rows)
    assert rendered(root, "<!-- models seeds sums: score -->\n").splitlines()[-1] == "| autoregressive | 0.500 (0.250-0.750) |"


def test_whole_processes_are_shown_by_their_medians(root: Path) -> None:
    times = {"first": [0.1, 0.9, 0.2], "last": [1.0, 3.0, 2.0], "end": [2.0] * 3, "peak": [7.0] * 3, "busy_share": [0.0] * 3}
    row = {"model": "m", "method": "auto", "start": "first", **times}
    (root / "docs" / "lab" / "results" / "start-tiny.jsonl").write_text(json.dumps(row) + "\n")
    shown = rendered(root, "<!-- processes start-tiny -->\n").splitlines()
    assert shown[-1] == "| m | auto | first | 0.20 | 2.00 | 2.00 | 7 |"


def test_heads_are_shown_as_they_were_before_and_after_their_training(root: Path) -> None:
    quality = {"divergence": 0.25, "agreement": 0.5, "sure": 0.75, "right": 1.0}
    metrics = {"2": {"before": dict.fromkeys(quality, 0.125), **quality}}
    card = HeadsCard(model="w", name="m", layers=[2], kind="square", hidden_size=8, vocab_size=9, training={}, metrics=metrics)
    records.write(root / "docs" / "lab" / "results" / "trained.jsonl", stored({Path("runs", "heads-sums"): card}))
    shown = rendered(root, "<!-- results trained held-out: KL, right where sure; heads-sums, 2 => sums, 2 -->\n").splitlines()
    assert shown[-1] == "| sums, 2 | 0.125 -> 0.250 | 0.125 -> 1.000 |"


def test_exits_have_a_row_for_each_figure(root: Path) -> None:
    exits = {"prompts": 2, "tokens": 9, "perplexity": [30.25, 9.5, 2.0], "agreement": [0.1, 0.5, 1.0]}
    rows = [record("autoregressive", [2.0, 2.0], exits=exits), record("swift, paper", [1.0, 1.0])]
    records.write(root / "docs" / "lab" / "results" / "depths.jsonl", rows)
    shown = rendered(root, "<!-- exits depths sums: 1, 3 -->\n").splitlines()
    assert shown[-2:] == ["| sums | perplexity | 30.2 | 2 |", "| sums | agreement with the last | 0.1 | 1 |"]


def test_figures_in_a_sentence_are_those_of_the_records(root: Path) -> None:
    page = '[9, 9](x.md#y "x of tiny sums sums@1: swift, paper") and [old](x.md "x plain of tiny sums: swift, paper; adasd").\n'
    assert rendered(root, page) == (
        '[1.60, 1.00](x.md#y "x of tiny sums sums@1: swift, paper") and '
        '[1.60; 0.50](x.md "x plain of tiny sums: swift, paper; adasd").\n'
    )


def test_prompts_that_do_not_count_were_tried(root: Path) -> None:
    assert rendered(root, '[9](x.md "tried of tiny sums: adasd")\n') == '[5](x.md "tried of tiny sums: adasd")\n'


def test_a_picture_is_drawn_again_only_if_the_results_change(root: Path) -> None:
    page = '![speeds](speeds.svg "chart of tiny sums: swift, paper; adasd")\n'
    assert rendered(root, page) == page
    picture = root / "speeds.svg"
    assert "<svg" in picture.read_text()
    rows = records.read(root / "docs" / "lab" / "results" / "tiny.jsonl")
    rows[1]["figures"]["speedups"]["autoregressive"] = {"value": 1.7, "low": 1.6, "high": 1.8}
    records.write(root / "docs" / "lab" / "results" / "tiny.jsonl", rows)
    assert [path for path, _ in changes(root)] == [picture]


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("<!-- results tiny sums: tokens/h -->\n", "no column 'tokens/h'"),
        ("<!-- results tiny others: x -->\n", "tiny has no record of the task others"),
        ("<!-- results tiny sums: x; nothing -->\n", "no row 'nothing'"),
        ("<!-- results none sums: x -->\n", "none.jsonl"),
        ("<!-- models tiny sums: x; nothing -->\n", "no row 'nothing'"),
        ("<!-- categories tiny sums: nothing -->\n", "no row 'nothing'"),
        ("<!-- results tiny sums: x-->\n", "1 of 1 tags cannot be read"),
        ('[1](x.md "x of tiny sums")\n', "1 of 1 tags cannot be read"),
        ('[1](x.md "x of tiny sums: nothing")\n', "no row 'nothing'"),
    ],
)
def test_names_without_a_record_are_faults_of_the_page(root: Path, page: str, fault: str) -> None:
    (root / "README.md").write_text(page)
    with pytest.raises(ValueError, match=f"README.md: .*{fault}"):
        [*changes(root)]


def test_the_pages_are_those_of_the_stored_results() -> None:
    """`python recipes/results.py` writes them anew."""
    assert [str(path) for path, _ in changes(ROOT)] == []


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.stem)
def test_stored_speed_ups_follow_from_the_stored_seconds(path: Path) -> None:
    rows = records.read(path)
    assert not any(word in path.read_text() for word in ('"/', "/home/", "/root/", "/tmp/")), "a path of one machine"
    for one in (one for one in rows if "autoregressive" in one["figures"]["speedups"]):
        ratio = speedup(one, baseline(one, rows))
        expected = one["figures"]["speedups"]["autoregressive"]
        assert rounded(vars(ratio)) == pytest.approx(expected, rel=2e-3), one["label"]


def test_the_stored_results_are_small() -> None:
    assert sum(path.stat().st_size for path in FILES) <= MAX_BYTES
