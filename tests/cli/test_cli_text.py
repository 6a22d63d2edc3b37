"""Text that goes in and out of `skipstone generate`, and the comparison with plain decoding."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import skipstone
from skipstone.cli import runs
from skipstone.decoding import verify
from skipstone.decoding.stats import Stats
from skipstone.utils import processor_watch
from skipstone.utils.processor_watch import ProcessorWatch, was_busy
from tests.helpers.commandline import LAYERSKIP, PROMPT, assert_refused, document, expected, program, run, succeed

SHORT = ("--max-new-tokens", 12, *LAYERSKIP)


def test_piped_text_loses_the_newline_that_echo_adds_and_a_file_loses_nothing(folder: Path, tmp_path: Path) -> None:
    common, file = ("generate", folder, "--json", *SHORT), tmp_path / "prompt.txt"

    def read(*flags: object, stdin: str | None = None) -> tuple[int, list[int]]:
        result = json.loads(succeed(*common, *flags, stdin=stdin).stdout)
        return result["prompt_tokens"], result["tokens"]

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


def test_json_is_whole_on_any_terminal(folder: Path, tmp_path: Path) -> None:
    named = tmp_path / "modèle 🙂"
    named.symlink_to(folder)
    arguments = ["generate", str(named), "--prompt", "x", *map(str, SHORT), "--json"]
    for charset in ("ascii", "latin-1", "utf-8"):
        result = CliRunner(charset=charset).invoke(program(), arguments)
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout_bytes.decode(charset))
        assert (found["model"], len(found["tokens"])) == (str(named), 12)


def test_figures_of_a_busy_machine_are_marked() -> None:
    assert processor_watch.busy_warning(None, 0.02) is None
    warning = processor_watch.busy_warning(0.02, 0.4)
    assert warning is not None
    assert "40 %" in warning
    with ProcessorWatch() as watch:
        threads = [threading.Thread(target=time.sleep, args=(0.02,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert watch.waited_share is None or 0 <= watch.waited_share <= 1


def test_a_comparison_says_that_the_machine_was_busy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processor_watch, "MIN_SECONDS", 0.0)
    monkeypatch.setattr(processor_watch, "busy_warning", lambda share: share is not None and "busy: measure again")
    result = succeed("generate", folder, "--prompt", PROMPT, *SHORT, "--compare")
    assert ("busy: measure again" in result.stderr) is Path("/proc/self/schedstat").exists()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="only Linux tells how long threads wait")
@pytest.mark.slow  # it loads the machine for half a second
def test_waiting_for_other_processes_is_noticed() -> None:
    def work() -> None:
        end = time.perf_counter() + 0.5
        while time.perf_counter() < end:
            pass

    cores = os.cpu_count() or 1
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4 * cores)]
    try:
        with ProcessorWatch() as watch:
            work()
    finally:
        for other in others:
            other.kill()
            other.wait()
    loaded = watch.waited_share
    assert loaded is not None
    assert was_busy(loaded)
    with ProcessorWatch() as idle:
        work()
    with watch:
        work()
    both = ProcessorWatch(watch, idle).waited_share
    assert loaded / 4 < (watch.waited_share or 0) < loaded, "the share is that of both blocks"
    assert loaded / 6 < (both or 0) < (watch.waited_share or 0), "and here of all three"


def test_a_first_request_has_the_set_up_work_of_the_warm_up() -> None:
    later = {"tokens": 30, "prefill_tokens": 1, "seconds_prefill": 0.04, "seconds_score": 0.2, "setup": {"request": 0.01}}
    figures = runs.pooled_figures([runs.Run([7] * 31, stats=Stats(**later))] * 2, {"request": 0.01, "int4 copy": 1.0})
    assert (figures["seconds"], figures["first_seconds"]) == (pytest.approx(0.5), pytest.approx(1.25))
    assert figures["tokens_per_second"] == pytest.approx(62 / 0.5)


def test_the_speed_up_of_auto_includes_its_set_up(folder: Path) -> None:
    stats = Stats(
        tokens=29, drafted=8, turns=20, prefill_tokens=1, seconds_prefill=0.02, seconds_score=0.08, seconds_draft=0.02
    )
    stats.setup = {"int4 copy": 1.1, "request": 0.001}
    measured = {"plain_seconds": 0.005, "plain_interval": (0.004, 0.006)}
    assert runs._speed_up_clauses(replace(stats, tokens=20, drafted=0), measured)[1].startswith(
        ", 0.80 x plain decoding (nothing"
    )
    clauses = runs._speed_up_clauses(stats, measured)
    assert clauses == (", 0.14 x plain decoding", ", 1.45 x plain decoding (1.16 to 1.74), whose step takes 5.00 ms")
    assert runs.setup_sentence(stats.setup) == "set-up 1.10 s: int4 copy 1.10 s"
    shown = succeed("generate", folder, "--prompt", PROMPT, *SHORT, "--method", "auto", "--stats").stderr
    assert re.search(
        r"new in [\d.]+ s, [\d.]+ tokens/s.*ended by.*\nsteady [\d.]+ tokens/s.*; set-up [\d.]+ s.*; prefill", shown
    )


def test_compare_counts_both_runs_alike_and_takes_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], skipstone.stream

    def watched(model: Any, ids: Any, method: Any, **options: Any) -> Any:
        seen.append(method.name)
        return real(model, ids, method, **options)

    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP, "--compare")
    monkeypatch.setattr(skipstone, "stream", watched)
    result = document(*common, "--repeat", 2)["comparison"]
    assert seen == ["autoregressive", "layerskip"] * 3, "both are warmed up"
    plain, method = result["plain"], result["method"]
    assert (result["identical"], result["divergence"], result["repeats"]) == (True, None, 2)
    assert plain["tokens"] == method["tokens"] == 48
    assert result["speed_up"] == pytest.approx(plain["seconds"] / method["seconds"])
    assert min(plain["setup"]["request"], method["setup"]["drafters"]) > 0
    assert result["first_speed_up"] == pytest.approx(plain["seconds"] / 2 / method["first_seconds"])
    assert plain["acceptance_rate"] is None
    assert method["ms_per_step_draft"] > 0
    assert 0 < method["acceptance_rate"] < 1 < method["mean_acceptance_length"]
    shown = succeed(*common)
    assert shown.stdout == expected(folder)[1]
    assert shown.stderr.splitlines()[-1] == "texts identical: yes"


def test_compare_names_the_first_difference_of_a_lossy_method(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24)
    result = document(*common, "--method", "early_exit exit_layer=1", "--compare")
    plain, lossy = expected(folder)[0], result["tokens"]
    at = next(i for i in range(24) if plain[i] != lossy[i])
    gap = result["comparison"]["divergence"]
    assert (result["comparison"]["identical"], result["lossless"]) == (False, False)
    assert (gap["position"], gap["plain"], gap["method"]) == (at, plain[at], lossy[at])
    assert "lossy" in result["comparison"]["verdict"]


def test_compare_notices_a_broken_verification(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = verify.match_greedy

    def gullible(draft: Any, picks: Any, waived: Any) -> Any:
        believed = picks.clone()
        believed[:, : draft.width] = draft.tokens
        return honest(draft, believed, waived)

    monkeypatch.setattr(verify, "match_greedy", gullible)
    result = succeed("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP, "--compare")
    last = result.stderr.splitlines()[-1]
    assert re.fullmatch(r"texts identical: no, first difference at token \d+: plain \d+ '.+', method \d+ '.+'", last), last


def test_compare_under_sampling_compares_tokens_only_where_they_must_agree(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, "--temperature", 1, "--seed", 3, "--compare")
    standard = document(*common, *LAYERSKIP)["comparison"]
    assert (standard["identical"], standard["divergence"]) == (None, None)
    assert "equal in law only" in standard["verdict"]
    coupled = document(*common, "--method", f"{LAYERSKIP[1]} rejection_sample_method=coupled")
    assert coupled["comparison"]["identical"] is True
    assert {"draft", "recovered"} <= set(coupled["origin"])
