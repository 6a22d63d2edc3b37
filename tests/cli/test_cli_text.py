"""What goes in and out of `skipstone generate` as text: a piped prompt, figures behind a text, JSON on any terminal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from skipstone.cli import compare_with_plain
from skipstone.lab.timing.machine import ProcessorWatch, was_busy
from tests.helpers.commandline import LAYERSKIP, PROMPT, assert_refused, program, run, succeed

SHORT = ("--max-new-tokens", 12, *LAYERSKIP)


def test_piped_text_loses_the_newline_that_echo_adds_and_a_file_loses_nothing(folder: Path, tmp_path: Path) -> None:
    common, file = ("generate", folder, "--json", *SHORT), tmp_path / "prompt.txt"

    def read(*flags: object, stdin: str | None = None) -> tuple[int, list[int]]:
        found = json.loads(succeed(*common, *flags, stdin=stdin).stdout)
        return found["prompt_tokens"], found["tokens"]

    for end, left in (("", ""), ("\n", ""), ("\r\n", ""), ("\n\n", "\n")):
        assert read(stdin=PROMPT + end) == read("--prompt", PROMPT + left)
    file.write_text(PROMPT + "\n")
    assert read("--prompt-file", file) == read("--prompt", PROMPT + "\n")
    for nothing in ("", "\n", "\r\n"):
        assert_refused(run("generate", folder, *SHORT, stdin=nothing), "empty")


@pytest.mark.parametrize("flag", ["--stats", "--compare", "--color"])
def test_what_is_told_begins_a_line_of_its_own(folder: Path, flag: str) -> None:
    result = succeed("generate", folder, "--prompt", PROMPT, *SHORT, flag)
    plain = succeed("generate", folder, "--prompt", PROMPT, *SHORT)
    assert not plain.stdout.endswith("\n")
    assert plain.stderr == ""
    assert result.output.partition("\n")[0].endswith(result.stdout.rpartition("\n")[2][-4:])
    assert result.stderr.startswith("\n")
    if flag != "--color":
        assert result.stdout == plain.stdout, "stdout holds the text and nothing else"


@pytest.mark.parametrize("charset", ["ascii", "latin-1", "utf-8"])
def test_json_is_whole_on_any_terminal(folder: Path, tmp_path: Path, charset: str) -> None:
    """The document holds the model's name, which no ASCII terminal can show."""
    named = tmp_path / "modèle 🙂"
    named.symlink_to(folder)
    arguments = ["generate", str(named), "--prompt", "x", *map(str, SHORT), "--json"]
    result = CliRunner(charset=charset).invoke(program(), arguments)
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout_bytes.decode(charset))
    assert found["model"] == str(named)
    assert len(found["tokens"]) == 12


def test_figures_of_a_busy_machine_are_marked() -> None:
    assert compare_with_plain.busy_warning(None, 0.02) is None
    warning = compare_with_plain.busy_warning(0.02, 0.4)
    assert warning is not None
    assert "40 %" in warning
    assert "idle machine" in warning


def test_a_comparison_says_that_the_machine_was_busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_with_plain, "busy_warning", lambda share: share is not None and "busy: measure again")
    result = succeed("generate", folder, "--prompt", PROMPT, *SHORT, "--compare")
    assert ("busy: measure again" in result.stderr) is Path("/proc/self/schedstat").exists()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells how long threads wait")
@pytest.mark.slow  # it loads the machine for half a second
def test_waiting_for_other_processes_is_noticed() -> None:
    cores = os.cpu_count() or 1
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * cores)]
    try:
        with ProcessorWatch() as watch:
            _work(0.5)
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert was_busy(watch.waited_share)


def test_waiting_is_a_share_of_the_time() -> None:
    with ProcessorWatch() as watch:
        threads = [threading.Thread(target=_work, args=(0.05,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert watch.waited_share is None or 0 <= watch.waited_share <= 1


def _work(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
