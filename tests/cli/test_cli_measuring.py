"""`bench`, `check` and `inspect` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import skipstone
from skipstone import ExitHeads, ModelRunner
from skipstone.engines.native import library
from skipstone.lab.bench import run_file
from skipstone.lab.check.check import Checker
from skipstone.methods.adadecode.heads import new_card
from tests.helpers.commandline import LAYERSKIP, assert_refused, document, run, succeed

SMALL = ("--num-prompts", 3, "--tune-prompts", 2, "--tune-tokens", 6, "--max-new-tokens", 10, "--ignore-eos")
METHODS = ("--method", "hf-generate", "--method", "autoregressive", "--method", "layerskip exit_layer=1,2")


@pytest.fixture(scope="module")
def results(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("measured") / "r.jsonl"
    succeed("bench", "run", folder, "--out", out, *METHODS, *SMALL)
    return out


def test_a_run_prints_its_table_and_goes_on_where_it_was(folder: Path, results: Path) -> None:
    before = run_file.read(results)
    again = succeed("bench", "run", folder, "--out", results, *METHODS, *SMALL)
    assert "layerskip" in again.stdout
    assert "tokens/s" in again.stdout
    after = run_file.read(results)
    assert len(after) == len(before) + 1
    assert_refused(run("bench", "run", folder, "--out", results, *METHODS, *SMALL, "--seed", 4), "seed differ")
    assert len(run_file.read(results)) == len(after)


def test_reports_in_every_format(results: Path, tmp_path: Path) -> None:
    assert "\n### " in succeed("bench", "report", results, "--format", "md").stdout
    assert succeed("bench", "report", results, "--layout", "swift").stdout.count("layerskip")
    page = tmp_path / "page.html"
    succeed("bench", "report", results, "--out", page)
    assert "<svg" in page.read_text()
    assert json.loads(succeed("bench", "report", results, "--format", "json").stdout)["groups"]


def test_comparing_a_run_with_itself_finds_nothing_and_a_slower_one_fails(results: Path, tmp_path: Path) -> None:
    assert "SLOWER" not in succeed("bench", "compare", results, results).stdout
    slow = tmp_path / "slow.jsonl"
    lines: list[Any] = [json.loads(line) for line in results.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "prompt":
            line["rows"]["layerskip"]["seconds"] *= 3
    slow.write_text("".join(json.dumps(line) + "\n" for line in lines))
    worse = run("bench", "compare", results, slow)
    assert worse.exit_code == 1
    assert "SLOWER" in worse.stdout


@pytest.mark.slow
def test_a_surrogate_says_that_it_is_one(tmp_path: Path) -> None:
    out = tmp_path / "s.jsonl"
    small = ("--num-prompts", 1, "--prompt-tokens", 8, "--max-new-tokens", 6)
    shown = succeed("bench", "surrogate", "layers=2,hidden=64,vocab=128", "--out", out, *small).stdout
    assert "SYNTHETIC MODEL" in shown


@pytest.mark.slow
def test_check_passes_what_is_right_and_fails_what_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--num-prompts", 3, "--max-new-tokens", 12, "--samples", 100)
    shown = succeed("check", folder, *LAYERSKIP, *small).stdout
    assert shown.count("\nok  ") + shown.startswith("ok  ") == (14 if library.missing() is None else 10)
    assert shown.rstrip().endswith("no bug found")
    wrong = ("check", folder, "--method", "early_exit exit_layer=1", *small)
    monkeypatch.setattr(Checker, "_probes", lambda self, real=Checker._probes: real(self)[:2])  # the others find it too
    lossy = run(*wrong)
    assert lossy.exit_code == 1
    assert "BUG  greedy texts" in lossy.stdout
    assert lossy.stdout.rstrip().endswith("NOT LOSSLESS")
    found = run(*wrong, "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["passed"] is False
    assert json.loads(found.stdout)["method"]["exit_layer"] == 1


def test_costs_are_shown_and_measured_once(folder: Path) -> None:
    first = document("costs", folder, "--batch", 1, "--batch", 2)
    assert [table["batch"] for table in first["batches"]] == [1, 2]
    assert first["fresh"]
    assert Path(first["path"]).is_file()
    shown = succeed("costs", folder, "--batch", 1, "--batch", 2).stdout
    assert shown.count("a plain step") == 2
    assert f"measured {first['measured']}" in shown, "it was kept"
    for batch, table in enumerate(first["batches"], 1):
        assert shown.count(f"batch {batch}: a plain step {1000 * table['plain']:.2f} ms") == 1
        assert f"{1000 * table['scoring']['values'][3]:.3f}" in shown
    assert not document("costs", folder, "--batch", 2)["fresh"]
    assert document("costs", folder, "--batch", 1, "--again")["fresh"]


def test_inspect_shows_every_layer_and_says_what_would_pay(folder: Path, tmp_path: Path) -> None:
    shown = succeed("inspect", folder, "--prompt", "abc", "--max-new-tokens", 6).stdout
    assert [line.split()[0] for line in shown.splitlines() if line.strip()[:1].isdigit()] == ["1", "2", "3", "4"]
    assert "pay" in shown
    found = document("inspect", folder, "--prompt", "abc", "--prompt", "de", "--max-new-tokens", 5)
    assert len(found["tokens"]) == len(found["texts"]) == len(found["top_texts"][0]) == 10
    assert found["top_texts"][-1] == found["texts"]
    assert (found["model"], found["dtype"], found["device"]) == (str(folder), "float32", "cpu")
    succeed("inspect", folder, "--prompt", "abc", "--max-new-tokens", 4, "--out", tmp_path / "a.html")
    assert (tmp_path / "a.html").stat().st_size > 10_000
    model = ModelRunner(skipstone.load(folder)[0])
    ExitHeads(new_card(model, (1, 2), "square")).save(tmp_path / "heads")
    look = ("inspect", folder, "--prompt", "abc", "--max-new-tokens", 4, "--heads", tmp_path / "heads")
    assert "KL, exit head" in succeed(*look, "--out", tmp_path / "a.png").stdout
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["a-heads.png", "a-layers.png", "a.png"]
    heads = document(*look)["heads"]
    assert heads["layers"] == [1, 2, 4]
    assert heads["own"] == heads["trained"], "a new T is the identity"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "run", "--task", "gsm8k", "--data-dir", "DIR"), "holds no gsm8k_test.jsonl"),
        (("bench", "run", "--allow-code-execution"), "--allow-code-execution has no effect"),
        (("bench", "surrogate", "llama-9b"), "a surrogate is one of llama-3.2-1b"),
        (("bench", "surrogate", "layers=2,hidden=64", "--agreement", "0.5"), "goes with --exit-layer or --skip-ratio"),
        (("bench", "report", "RESULTS", "--pictures", "DIR", "--format", "md"), "--pictures writes pictures and nothing else"),
        (("inspect", "--out", "a.svg"), "--out is a .png file or a .html page, found a.svg"),
        (("check", "FOLDER", *LAYERSKIP, "--num-prompts", "99"), "there are 40 prompts"),
        (("costs", "FOLDER", "--draft-model", "nowhere"), "nowhere: no folder"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], said: str, folder: Path, results: Path, tmp_path: Path) -> None:
    places = {"FOLDER": folder, "RESULTS": results, "DIR": tmp_path}
    assert_refused(run(*(places.get(one, one) for one in arguments)), said)
