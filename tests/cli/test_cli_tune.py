"""`skipstone tune`: what it prints, what it keeps, and who picks that up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.helpers.commandline import PROMPT, assert_refused, document, run, succeed


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_every_candidate_has_a_line_and_there_is_a_recommendation(folder: Path, cache: Path) -> None:
    common = ("tune", folder, "--prompt", PROMPT, "--budget-seconds", 1, "--max-new-tokens", 40)
    said = succeed(*common, "--method", "layerskip exit_layer=3").stdout
    for name in ("prompt_lookup", "recycle", "layerskip, exit 3", "layerskip, exit 1", "layerskip, exit 2"):
        assert name in said
    assert "pays" in said or "brings" in said
    (file,) = (cache / "auto").iterdir()
    assert str(file) in said.replace("\n", "")
    kept = json.loads(file.read_text())
    assert kept["about"]["recommendation"] in said.replace("\n", " ")


def test_what_is_kept_is_where_the_next_run_begins(folder: Path, cache: Path) -> None:
    said = document("tune", folder, "--prompt", PROMPT, "--budget-seconds", 1, "--max-new-tokens", 40)
    log = cache.parent / "steps.jsonl"
    text = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 12, "--method")
    succeed(*text, f"auto log={log}")
    first = json.loads(log.read_text().splitlines()[0])["state"]
    assert first["position"] > 30, "it begins with what was learnt"
    assert said["stats"]["tokens_per_second"] > 0
    other = cache.parent / "other.jsonl"
    succeed(*text, f"auto log={other} use_profile=false")
    assert json.loads(other.read_text().splitlines()[0])["state"]["position"] == 0


@pytest.mark.slow
def test_nothing_is_saved_on_request_and_a_damaged_file_counts_as_none(folder: Path, cache: Path) -> None:
    common = ("tune", folder, "--prompt", PROMPT, "--budget-seconds", 1, "--max-new-tokens", 16)
    succeed(*common, "--no-keep")
    assert not (cache / "auto").exists()
    succeed(*common)
    (file,) = (cache / "auto").iterdir()
    for number, text in enumerate(("{", "{}", json.dumps(json.loads(file.read_text()) | {"state": {}}))):
        file.write_text(text)
        log = cache.parent / f"steps{number}.jsonl"
        succeed("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 4, "--method", f"auto log={log}")
        assert json.loads(log.read_text().splitlines()[0])["state"]["position"] == 0


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (("--method", "adasd"), "adasd with these settings changes texts"),
        (("--method", "layerskip exit_layer=99"), "exit_layer"),
    ],
)
def test_what_is_wrong_is_one_sentence(folder: Path, flags: tuple[str, str], part: str) -> None:
    assert_refused(run("tune", folder, *flags), part)
