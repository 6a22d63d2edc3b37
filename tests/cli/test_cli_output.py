"""`skipstone generate`: what is written where, and what the decoding flags do."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from skipstone.cli import terminal
from skipstone.cli.token_printer import TokenPrinter
from skipstone.decoding.draft import Step
from tests.helpers import wrapped
from tests.helpers.commandline import LAYERSKIP, PROMPT, document, expected, job, program, succeed
from tests.helpers.support import alone, tokenizer


@pytest.mark.parametrize("method", ["autoregressive", "layerskip"])
def test_stdout_is_the_text_that_transformers_generates_and_nothing_else(folder: Path, method: str) -> None:
    flags = LAYERSKIP if method == "layerskip" else ("--method", method)
    result = succeed("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *flags)
    assert result.stdout == expected(folder)[1]
    assert result.stderr == ""


def test_a_multimodal_checkpoint_writes_text(tmp_path: Path) -> None:
    model, words = wrapped.build("qwen2_vl"), tokenizer()
    for one in (model, words):
        one.save_pretrained(tmp_path)
    ids = words("the abc stop", return_tensors="pt")["input_ids"]
    text = words.decode(alone(model, ids[0], max_new_tokens=12, do_sample=False), skip_special_tokens=True)
    result = succeed("generate", tmp_path, "--prompt", "the abc stop", "--max-new-tokens", 12, *LAYERSKIP)
    assert result.stdout == text


def test_prompt_tokens_keeps_the_last_ones(folder: Path) -> None:
    result = document("generate", folder, "--prompt", "x" * 40 + PROMPT, "--prompt-tokens", len(PROMPT), *LAYERSKIP)
    assert result["prompt_tokens"] == len(PROMPT)
    assert len(result["tokens"]) == 128
    assert result["tokens"][:24] == expected(folder)[0]


def test_chat_wraps_the_prompt_in_the_template(folder: Path) -> None:
    result = document("generate", folder, "--prompt", "hi", "--chat", *LAYERSKIP, "--max-new-tokens", 12)
    assert result["tokens"] == expected(folder, "[user] hi\n[assistant] ", tokens=12)[0]


def test_json_is_one_document_with_every_tokens_origin(folder: Path) -> None:
    result = succeed("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP, "--json")
    found = json.loads(result.stdout)
    tokens, text = expected(folder)
    assert (found["tokens"], found["text"], found["prompt_tokens"]) == (tokens, text, len(PROMPT))
    assert found["method"] | {"exit_layer": 2, "num_speculative_tokens": 4} == found["method"]
    assert (found["lossless"], found["comparison"], found["finish_reason"]) == (True, None, "length")
    origin = found["origin"]
    assert len(origin) == 24
    assert origin[0] == "prefill"
    assert origin.count("draft") == found["stats"]["accepted"] > 0
    assert 0 < origin.count("recovered") < 24, "nothing was rejected: the test would not notice wrong origins"


def test_stats_go_to_stderr_and_agree_with_json(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP)
    said = succeed(*common, "--stats")
    stats = document(*common)["stats"]
    assert said.stdout == expected(folder)[1]
    assert f"M {stats['mean_acceptance_length']:.2f}" in said.stderr
    assert f"({stats['accepted']} of {stats['draft_steps']} drafts accepted)" in said.stderr
    assert "24 new" in said.stderr
    assert "ended by length" in said.stderr
    assert "layerskip decides nothing: there is no choice" in succeed(*common, "--explain").stderr


def test_auto_says_what_it_chose_and_why(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, "--method", f"auto log={log}")
    said = succeed(*common, "--stats", "--explain")
    assert said.stdout == expected(folder)[1]
    turns = re.search(r"turns by what drafted: (.*?);", said.stderr)
    assert turns is not None
    assert re.search(r"\d\.\d\d x plain decoding \(\d\.\d\d to \d\.\d\d\)", said.stderr)
    assert "plain decoding is timed" in said.stderr
    counts = [int(one) for one in re.findall(r" (\d+)(?:,|$)", turns[1])]
    replayed = json.loads(succeed("inspect", "--replay", log, "--json").stdout)
    assert 0 < len(replayed["decisions"]) == replayed["same"] < sum(counts), "the first step is not decided"
    told = succeed("inspect", "--replay", log).stdout
    assert f"{replayed['same']} of {replayed['same']} decisions are as recorded" in told
    lost = sum(one["plain_steps_lost"] for one in replayed["decisions"])
    table = told[told.index("plain steps lost") :]
    rows = [float(line.split()[-1]) for line in table.splitlines() if re.search(r"^\s*[a-z].*\d\.\d\s*$", line)]
    assert len(rows) == len({one["kind"] for one in replayed["decisions"]})
    assert sum(rows) == pytest.approx(lost, abs=0.06 * len(rows))


def test_color_underlines_accepted_drafts_and_changes_no_character(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP)
    plain = document(*common)
    result = succeed(*common, "--color")
    pieces = re.findall(r"\x1b\[4;32m(.*?)\x1b\[0m|([^\x1b])", result.stdout, flags=re.DOTALL)
    assert "".join(drafted or other for drafted, other in pieces) == plain["text"]
    for (drafted, other), origin in zip(pieces, plain["origin"], strict=True):  # one id is one character
        assert other == "\n" or bool(drafted) == (origin == "draft")
    assert sum(bool(drafted) for drafted, _ in pieces) > 3
    assert "accepted draft" in result.stderr


def test_what_stdout_cannot_encode_is_replaced_in_a_text() -> None:
    asked = ["generate", "--prompt", "é", "--max-new-tokens", "4", "--method", "autoregressive"]
    right = document(*asked)["text"]
    assert not right.isascii()
    shown = CliRunner(charset="ascii").invoke(program(), asked)
    assert (shown.exit_code, shown.stdout) == (0, right.encode("ascii", "replace").decode())


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("no_color", "marked"), [(False, True), (True, False)])
def test_on_a_terminal_drafts_are_marked_unless_no_color_is_set(
    folder: Path, monkeypatch: pytest.MonkeyPatch, no_color: bool, marked: bool
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    painter = TokenPrinter(job(folder), None)
    painter.show(_step([40, 95, 41], ["draft", "draft", "recovered"]))
    painter.end()
    assert screen.getvalue() == ("\x1b[4;32mH\x1b[0m\nI\n" if marked else "H\nI\n")


def test_a_models_control_characters_cannot_drive_a_terminal() -> None:
    assert terminal.harmless("a\x1b[2J\x07\r\x9b\x7f\n\tü") == "a␛[2J␇␍\ufffd␡\n\tü"


def _step(tokens: list[int], origin: list[str]) -> Step:
    return Step([tokens], [origin], [0], [0], [0], [0])


# decoding flags


def test_stop_ends_the_text_and_says_so(folder: Path) -> None:
    tokens, text = expected(folder)
    stop = text[9:11]
    result = document(
        "generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP, "--stop", "never met", "--stop", stop
    )
    end = text.index(stop) + 2
    assert (result["text"], result["tokens"], result["finish_reason"]) == (text[:end], tokens[:end], "stop")


def test_end_of_text_ends_the_run_unless_ignored(folder: Path, variant: Callable[..., Path]) -> None:
    tokens = expected(folder)[0]
    end = next(i for i in range(5, 24) if tokens[i] not in tokens[:i])
    ending = variant("generation_config.json", eos_token_id=[tokens[end], 96])
    common = ("generate", ending, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP)
    stopped, ignored = document(*common), document(*common, "--ignore-eos")
    assert (stopped["tokens"], stopped["finish_reason"]) == (tokens[: end + 1], "eos")
    assert (ignored["tokens"], ignored["finish_reason"]) == (tokens, "length")


def test_sampling_repeats_with_its_seed_and_differs_with_another(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, *LAYERSKIP, "--max-new-tokens", 24, "--temperature", 1, "--top-k", 20)
    first, again, other = (document(*common, "--seed", seed) for seed in (1, 1, 2))
    assert first["tokens"] == again["tokens"] != other["tokens"]
    assert first["tokens"] != expected(folder)[0]
    assert first["decoding"] == {"max_new_tokens": 24, "do_sample": True, "temperature": 1.0, "top_k": 20, "seed": 1}
    drawn = document(*common)
    assert document(*common, "--seed", drawn["decoding"]["seed"])["tokens"] == drawn["tokens"]


def test_min_p_and_top_p_reach_the_sampler(folder: Path) -> None:
    greedy = expected(folder)[0]
    common = ("generate", folder, "--prompt", PROMPT, *LAYERSKIP, "--max-new-tokens", 24, "--temperature", 1, "--seed", 1)
    assert document(*common, "--min-p", 1)["tokens"] == greedy
    assert document(*common, "--top-p", 0.0001)["tokens"] == greedy
    assert document(*common)["tokens"] != greedy


def test_the_engine_is_named_by_stats_and_json(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 4, *LAYERSKIP, "--engine", "eager")
    told = succeed(*common, "--stats").stderr.splitlines()
    assert "engine eager: transformers' own modules, torch.float32, cpu" in told
    found = document(*common)
    assert (found["engine"], found["engine_reason"]) == ("eager", None)
