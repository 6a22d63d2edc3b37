"""`--compare`: every figure and verdict is computed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import skipstone
from skipstone.cli.compare_with_plain import first_difference
from skipstone.cli.timed_run import Run
from skipstone.decoding import verify
from tests.helpers.commandline import LAYERSKIP, PROMPT, document, expected, job, succeed


def test_compare_counts_both_runs_alike(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP, "--compare", "--repeat", 2)
    found = document(*common)["comparison"]
    plain, method = found["plain"], found["method"]
    assert (found["identical"], found["divergence"], found["repeats"]) == (True, None, 2)
    assert plain["tokens"] == method["tokens"] == 48
    assert found["speed_up"] == pytest.approx(plain["seconds"] / method["seconds"])
    assert plain["acceptance_rate"] is None
    assert method["ms_per_step_draft"] > 0
    assert 0 < method["acceptance_rate"] < 1 < method["mean_acceptance_length"]


def test_compare_prints_a_table_on_stderr_beside_the_text(folder: Path) -> None:
    result = succeed("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP, "--compare")
    assert result.stdout == expected(folder)[1]
    header, rows = result.stderr, [line.split("│")[1:-1] for line in result.stderr.splitlines() if line.startswith("│")]
    assert all(word in header for word in ("tokens/s", "speed-up", "alpha", "draft", "score", "other"))
    assert [row[0].strip() for row in rows] == ["plain", "layerskip"]
    assert [row[1].strip() for row in rows] == ["24", "24"]
    assert result.stderr.splitlines()[-1] == "texts identical: yes"


def test_compare_warms_both_up_and_takes_turns(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, real = [], skipstone.stream

    def watched(model: Any, ids: Any, method: Any, **options: Any) -> Any:
        seen.append(method.name)
        return real(model, ids, method, **options)

    monkeypatch.setattr(skipstone, "stream", watched)
    document("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 4, *LAYERSKIP, "--compare", "--repeat", 2)
    assert seen == ["autoregressive", "layerskip"] * 3


def test_compare_names_the_first_difference_of_a_lossy_method(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24)
    found = document(*common, "--method", "early_exit exit_layer=1", "--compare")
    plain, lossy = expected(folder)[0], found["tokens"]
    at = next(i for i in range(24) if plain[i] != lossy[i])
    gap = found["comparison"]["divergence"]
    assert (found["comparison"]["identical"], found["lossless"]) == (False, False)
    assert (gap["position"], gap["plain"], gap["method"]) == (at, plain[at], lossy[at])
    assert "lossy" in found["comparison"]["verdict"]


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


def test_a_text_that_ends_early_differs_at_its_end(folder: Path) -> None:
    mine = job(folder)
    gap = first_difference(mine, [Run([1, 2]), Run([1, 2, 3])], [Run([1, 2]), Run([1, 2])])
    assert gap is not None
    assert str(gap) == "first difference at token 2: plain 3 '#', method ended"
