"""The file of a run: what is written stays, whatever kills the process and wherever."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from skipstone.lab.bench import run_file
from skipstone.lab.bench.run_file import RunFile
from tests.helpers.training import in_processes, kill_when

PLAN = {"models": ["a"], "seed": 0, "lengths": (2, 4)}
COUNT = 30


def write_all(path: Path, moment: int | None, note: Path) -> None:
    """A process: one line a number, those that are there left out, and an event before and after each."""
    import sys

    if moment is not None:
        kill_when(path.parent, moment, note)
    with RunFile(path, PLAN, {"pid": 1}) as file:
        done = {line["number"] for line in file.lines_of("prompt")}
        for number in range(COUNT):
            if number not in done:
                sys.audit("training.step")
                file.add({"kind": "prompt", "number": number, "text": "é\u2028\x85" * 2000})


@pytest.mark.parametrize("kills", [3, pytest.param(10, marks=pytest.mark.slow)])
def test_killed_again_and_again_it_loses_nothing(tmp_path: Path, kills: int) -> None:
    dice, path = random.Random(0), tmp_path / "run" / "results.jsonl"
    path.parent.mkdir()
    for _ in range(kills):
        before = [line["number"] for line in run_file.read(path) if line["kind"] == "prompt"] if path.exists() else []
        assert in_processes(write_all, (path, dice.randrange(1, 8), tmp_path / "note"), start="fork") == [-9]
        after = [line["number"] for line in run_file.read(path) if line["kind"] == "prompt"] if path.exists() else []
        assert after[: len(before)] == before
    assert in_processes(write_all, (path, None, tmp_path / "note"), start="fork") == [0]
    lines = run_file.read(path)
    assert [line["number"] for line in lines if line["kind"] == "prompt"] == list(range(COUNT))
    assert lines[0]["plan"] == {"models": ["a"], "seed": 0, "lengths": [2, 4]}
    assert sum(line["kind"] == "resumed" for line in lines) >= kills // 2


def test_another_plan_another_version_or_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    RunFile(path, {**PLAN, "seed": 7}, {}).__exit__(None, None, None)
    with RunFile(path, PLAN, {}) as file:  # nothing was measured yet: a corrected command begins anew
        assert [line["kind"] for line in file.lines] == ["run"]
        file.add({"kind": "prompt", "number": 0})
    content = path.read_bytes()
    with pytest.raises(ValueError, match=r"holds another run: extra, seed differ \(extra: None there, 1 here\)"):
        RunFile(path, {**PLAN, "seed": 1, "extra": 1}, {})
    assert path.read_bytes() == content
    with pytest.raises(ValueError, match=r"threads differ \(threads: None there, 9 here\)"):
        RunFile(path, PLAN, {"threads": 9})
    RunFile(path, {**PLAN, "seed": 1}, {}, fresh=True).__exit__(None, None, None)
    assert run_file.read(path)[0]["plan"]["seed"] == 1
    with RunFile(path, {**PLAN, "seed": 1}, {}), pytest.raises(ValueError, match="being written by another run"):
        RunFile(path, {**PLAN, "seed": 1}, {})
    path.write_text("notes of mine")
    with pytest.raises(ValueError, match="no file of results"):
        RunFile(path, PLAN, {})
    assert path.read_text() == "notes of mine"
    path.write_text('{"kind": "run", "version": 99, "plan": {}}\n')
    with pytest.raises(ValueError, match="version 99, this skipstone reads version 1"):
        run_file.read(path)
