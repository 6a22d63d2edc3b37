"""`bench`, `check`, `inspect`, `costs`, `tune` and `demo` as a user types them."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

import skipstone
from skipstone import ExitHeads, ModelRunner
from skipstone.cli import demo
from skipstone.engines.native import library
from skipstone.lab.bench import run_file
from skipstone.lab.check.check import Checker
from skipstone.methods.adadecode.heads import new_card
from skipstone.methods.auto import saved_profile
from tests.helpers.commandline import LAYERSKIP, PROMPT, assert_refused, document, run, succeed
from tests.helpers.feature_heads import eagle3_folder
from tests.helpers.mtp_checkpoints import mtp_checkpoint

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


def test_reports_in_every_format_and_comparisons_of_runs(results: Path, tmp_path: Path) -> None:
    assert "\n### " in succeed("bench", "report", results, "--format", "md", "--layout", "swift").stdout
    page, slow = tmp_path / "page.html", tmp_path / "slow.jsonl"
    succeed("bench", "report", results, "--out", page)
    assert "<svg" in page.read_text()
    assert json.loads(succeed("bench", "report", results, "--format", "json").stdout)["groups"]
    assert "SLOWER" not in succeed("bench", "compare", results, results).stdout
    lines: list[Any] = [json.loads(line) for line in results.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "prompt":
            line["rows"]["layerskip"]["seconds"] *= 3
        elif line["kind"] == "first":
            assert "waited_share" in line
            line["waited_share"] = 0.9
    slow.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "first requests: the machine was busy at 3" in succeed("bench", "report", slow).stdout.replace("\n", " ")
    worse = run("bench", "compare", results, slow)
    assert worse.exit_code == 1
    assert "SLOWER" in worse.stdout


@pytest.mark.slow
def test_check_passes_what_is_right_and_fails_what_is_not(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--num-prompts", 3, "--max-new-tokens", 12, "--samples", 100)
    shown = succeed("check", folder, *LAYERSKIP, *small).stdout
    assert shown.count("\nok  ") + shown.startswith("ok  ") == (11 if library.missing() else 15 + (len(library.levels()) > 1))
    assert shown.rstrip().endswith("no bug found")
    wrong = ("check", folder, "--method", "early_exit exit_layer=1", *small)
    monkeypatch.setattr(Checker, "_probes", lambda self, real=Checker._probes: real(self)[:3])  # the others find it too
    lossy = run(*wrong)
    assert lossy.exit_code == 1
    assert "BUG  greedy texts" in lossy.stdout
    assert lossy.stdout.rstrip().endswith("NOT LOSSLESS")
    result = run(*wrong, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["passed"] is False
    assert json.loads(result.stdout)["method"]["exit_layer"] == 1


@pytest.mark.slow
def test_costs_are_shown_and_measured_once(folder: Path) -> None:
    first = document("costs", folder, "--batch", 1, "--batch", 2)
    assert [table["batch"] for table in first["batches"]] == [1, 2]
    assert first["fresh"]
    assert Path(first["path"]).is_file()
    shown = succeed("costs", folder, "--batch", 1, "--batch", 2).stdout
    assert f"measured {first['measured']}" in shown, "it was kept"
    for batch, table in enumerate(first["batches"], 1):
        assert shown.count(f"batch {batch}: a plain step {1000 * table['plain']:.2f} ms") == 1
    assert document("costs", folder, "--batch", 1, "--again")["fresh"]


@pytest.mark.slow
def test_inspect_shows_every_layer_and_says_what_would_pay(folder: Path, tmp_path: Path) -> None:
    shown = succeed("inspect", folder, "--prompt", "abc", "--max-new-tokens", 4, "--out", tmp_path / "a.html").stdout
    assert [line.split()[0] for line in shown.splitlines() if line.strip()[:1].isdigit()] == ["1", "2", "3", "4"]
    assert "pay" in shown
    assert (tmp_path / "a.html").stat().st_size > 10_000
    model = ModelRunner(skipstone.load(folder)[0])
    ExitHeads(new_card(model, (1, 2), "square")).save(tmp_path / "heads")
    look = ("inspect", folder, "--prompt", "abc", "--prompt", "de", "--max-new-tokens", 5, "--heads", tmp_path / "heads")
    assert "KL, exit head" in succeed(*look, "--out", tmp_path / "a.png").stdout
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["a-heads.png", "a-layers.png", "a.png"]
    result = document(*look)
    assert len(result["tokens"]) == len(result["texts"]) == len(result["top_texts"][0]) == 10
    assert result["heads"]["layers"] == [1, 2, 4]
    assert result["heads"]["own"] == result["heads"]["trained"], "a new T is the identity"


def test_inspect_says_what_heads_would_bring(folder: Path, tmp_path: Path) -> None:
    mtp_checkpoint(tmp_path / "mtp", "glm4_moe")
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path / "mtp")
    head = eagle3_folder(tmp_path / "head", AutoConfig.from_pretrained(tmp_path / "mtp"))
    look = ("inspect", tmp_path / "mtp", "--prompt", "abc", "--max-new-tokens", 8)
    eagle3 = ("--method", f"eagle3 head={head} feature_layers=1,2,4")
    found = document(*look, *eagle3)["feature_heads"]
    assert [(one["kind"], one["layers"], len(one["accepted"])) for one in found] == [("mtp", [4], 7), ("eagle3", [1, 2, 4], 7)]
    shown = succeed(*look, *eagle3).stdout
    assert all(title in shown for title in ("reads layers", "first 1, 2, 3 accepted"))
    assert "pay" in shown.splitlines()[-1]
    assert document(*look, "--no-mtp")["feature_heads"] == []
    assert_refused(run(*look, "--method", "recycle"), "--method takes eagle3 or mtp, found 'recycle'")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("bench", "run", "--task", "gsm8k", "--data-dir", "DIR"), "holds no gsm8k_test.jsonl"),
        (("bench", "run", "--allow-code-execution"), "--allow-code-execution has no effect"),
        (("bench", "report", "RESULTS", "--pictures", "DIR", "--format", "md"), "--pictures writes pictures and nothing else"),
        (("check", "FOLDER", *LAYERSKIP, "--num-prompts", "99"), "there are 40 prompts"),
        (("tune", "FOLDER", "--method", "adasd"), "adasd with these settings changes texts"),
        (("tune", "FOLDER", "--method", "layerskip exit_layer=99"), "exit_layer"),
    ],
)
def test_mistakes_are_one_sentence(arguments: tuple[str, ...], said: str, folder: Path, results: Path, tmp_path: Path) -> None:
    places = {"FOLDER": folder, "RESULTS": results, "DIR": tmp_path}
    assert_refused(run(*(places.get(one, one) for one in arguments)), said)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_candidate_has_a_line_and_the_next_run_begins_with_what_was_learnt(folder: Path, cache: Path) -> None:
    common = ("tune", folder, "--prompt", PROMPT, "--budget-seconds", 1, "--max-new-tokens", 40)
    said = succeed(*common, "--method", "layerskip exit_layer=3").stdout
    assert all(name in said for name in ("prompt_lookup", "recycle", "layerskip, exit 3", "layerskip, exit 1"))
    loaded = ModelRunner(skipstone.load(folder)[0])
    assert saved_profile.load_profile(loaded) is not None
    (file,) = [file for file in (cache / "auto").iterdir() if str(file) in said.replace("\n", "")]
    assert json.loads(file.read_text())["about"]["recommendation"] in said.replace("\n", " ")
    if library.missing() is None:
        (copy,) = (cache / "packed").iterdir()
        assert "self_speculative, int4" in said
        assert copy.suffix == ".panels"
    log = cache.parent / "steps.jsonl"
    text = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--method")
    succeed(*text, f"auto log={log}")
    assert json.loads(log.read_text().splitlines()[0])["state"]["position"] > 30
    other = cache.parent / "other.jsonl"
    succeed(*text, f"auto log={other} use_profile=false")
    assert json.loads(other.read_text().splitlines()[0])["state"]["position"] == 0


@pytest.mark.slow
def test_nothing_is_saved_on_request_and_a_damaged_file_counts_as_none(folder: Path, cache: Path) -> None:
    common = ("tune", folder, "--prompt", PROMPT, "--budget-seconds", 1, "--max-new-tokens", 16)
    assert "no copy in int4" in succeed(*common, "--no-keep", "--no-cache").stderr
    assert not (cache / "auto").exists()
    succeed(*common)
    whole = next((cache / "auto").iterdir()).read_text()
    for number, text in enumerate(("{", "{}", json.dumps(json.loads(whole) | {"state": {}}))):
        for file in (cache / "auto").iterdir():
            file.write_text(text)
        log = cache.parent / f"steps{number}.jsonl"
        succeed("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 4, "--method", f"auto log={log}")
        assert json.loads(log.read_text().splitlines()[0])["state"]["position"] == 0


DEFAULT = {"method": "layerskip", "exit_layer": 2, "num_speculative_tokens": 3}


@pytest.fixture
def own(variant: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(demo, "SCENES", (demo.DemoPrompt("first", "> wake me\n", 24), demo.DemoPrompt("second", "def f(", 16)))
    return variant("generation_config.json", skipstone=DEFAULT, _from_model_config=False)


def test_figures_are_those_of_both_runs_and_the_picture_fetches_nothing(own: Path, tmp_path: Path) -> None:
    succeed("demo", own, "--svg", tmp_path / "demo.svg")
    picture = (tmp_path / "demo.svg").read_text()
    assert picture.startswith("<svg")
    assert not re.search("@font-face|cdn", picture)
    result = document("demo", own)
    assert result["method"]["exit_layer"] == 2
    assert [scene["title"] for scene in result["scenes"]] == ["first", "second"]
    for scene in result["scenes"]:
        plain, method, theirs = scene["plain"], scene["method"], scene["transformers"]
        assert (scene["identical"], theirs["identical"]) == (True, True)
        assert theirs["tokens"] == plain["tokens"] == method["tokens"] > 0
        assert plain["acceptance_rate"] is None
        assert 0 < method["acceptance_rate"] <= 1
        assert theirs["tokens_per_second"] == pytest.approx(theirs["tokens"] / theirs["seconds"])
        assert scene["speed_up"] == pytest.approx(method["tokens_per_second"] / plain["tokens_per_second"])


def test_what_cannot_be_shown_is_refused_and_texts_that_differ_are_called_different(
    own: Path, folder: Path, tmp_path: Path
) -> None:
    assert_refused(run("demo", own, "--svg", tmp_path / "nowhere" / "demo.svg"), "nowhere: no such folder")
    assert_refused(run("demo", own, "--json", "--svg", tmp_path / "demo.svg"), "give one of them")
    assert_refused(run("demo", folder), "names no method of its own")
    config = json.loads((own / "generation_config.json").read_text())
    lossy = config | {"skipstone": {"method": "early_exit", "exit_layer": 1}}
    (own / "generation_config.json").write_text(json.dumps(lossy))
    assert document("demo", own)["scenes"][1]["identical"] is False


@pytest.mark.slow
def test_without_a_model_the_bundled_one_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "SCENES", demo.SCENES[:1])
    result = document("demo")
    assert result["method"]["method"] == "layerskip"
    (scene,) = result["scenes"]
    assert scene["identical"] is True
    assert scene["method"]["mean_acceptance_length"] > 1.5
    text = succeed("generate", "--prompt", demo.SCENES[0].prompt).stdout
    assert json.loads(text)["intent"] == "set_alarm"
