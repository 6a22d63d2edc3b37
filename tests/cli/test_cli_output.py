"""`skipstone generate`: what is written where, what the decoding flags do, interruption and pipes."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from transformers import AutoConfig

import skipstone
from skipstone.cli import terminal
from skipstone.cli.runs import TokenPrinter
from skipstone.decoding.draft import Step
from skipstone.engines.native import library
from tests.helpers.commandline import LAYERSKIP, PROMPT, Screen, assert_refused, document, expected, job, program, run, succeed
from tests.helpers.feature_heads import eagle3_folder
from tests.helpers.mtp_checkpoints import mtp_checkpoint


def test_stdout_is_the_text_that_transformers_generates_and_nothing_else(folder: Path) -> None:
    result = succeed("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP)
    assert (result.stdout, result.stderr) == (expected(folder)[1], "")
    found = document("generate", folder, "--prompt", "x" * 40 + PROMPT, "--prompt-tokens", len(PROMPT), *LAYERSKIP)
    assert (found["prompt_tokens"], len(found["tokens"])) == (len(PROMPT), 128)
    assert found["tokens"][:24] == expected(folder)[0]
    found = document("generate", folder, "--prompt", "hi", "--chat", *LAYERSKIP, "--max-new-tokens", 12)
    assert found["tokens"] == expected(folder, "[user] hi\n[assistant] ", tokens=12)[0]


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


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
def test_json_has_the_compute_dtype_of_the_engine(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 2, "--compute-dtype")
    assert document(*common[:-1])["compute_dtype"] == "float32", "its weights are"
    assert document(*common, "float32", "--engine", "eager")["compute_dtype"] == "float32"
    assert document(*common[:-1], "--dtype", "bfloat16")["compute_dtype"] == "bfloat16"
    assert document(*common, "bfloat16", "--dtype", "bfloat16")["compute_dtype"] == "bfloat16"
    assert document(*common, "float32", "--dtype", "bfloat16")["compute_dtype"] == "float32"
    assert_refused(run(*common, "bfloat16"), "compute_dtype='bfloat16', asked for now or when the model was loaded, needs bfl")
    costs = ("costs", folder, "--dtype", "bfloat16", "--batch", 1)
    details = [document(*costs, *option)["key"]["detail"] for option in ((), ("--compute-dtype", "float32"))]
    assert ["rounded to bfloat16" in detail for detail in details] == [True, False]


def test_stats_say_what_the_mtp_layer_takes_unless_it_is_left_out(folder: Path, tmp_path: Path) -> None:
    mtp_checkpoint(tmp_path, "glm4_moe")
    for file in folder.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    common = ("generate", tmp_path, "--prompt", PROMPT, "--max-new-tokens", 2, "--method", "autoregressive", "--stats")
    with_layer, without = succeed(*common), succeed(*common, "--no-mtp")
    assert "MTP layer, extra memory: 0.1 MB; --no-mtp leaves it out" in with_layer.stderr.splitlines()
    assert "MTP" not in without.stderr
    assert with_layer.stdout == without.stdout


def test_stats_say_what_an_eagle_3_head_takes(folder: Path, tmp_path: Path) -> None:
    head = eagle3_folder(tmp_path / "head", AutoConfig.from_pretrained(folder))
    shown = succeed("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 2, "--method", f"eagle3 head={head}", "--stats")
    assert re.search(r"^EAGLE-3 head, extra memory: 0\.\d MB$", shown.stderr, re.MULTILINE)


def test_stats_go_to_stderr_and_agree_with_json(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP, "--engine", "eager")
    said, result = succeed(*common, "--stats", "--explain"), document(*common)
    stats = result["stats"]
    assert (result["engine"], result["engine_reason"]) == ("eager", None)
    assert said.stdout == expected(folder)[1]
    assert f"M {stats['mean_acceptance_length']:.2f}" in said.stderr
    assert f"({stats['accepted']} of {stats['draft_steps']} drafts accepted)" in said.stderr
    assert "layerskip decides nothing: there is no choice" in said.stderr


def test_auto_says_what_it_chose_and_why(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, "--method", f"auto log={log}")
    said = succeed(*common, "--stats", "--explain")
    assert said.stdout == expected(folder)[1]
    assert "turns by what drafted: " in said.stderr
    replayed = json.loads(succeed("inspect", "--replay", log, "--json").stdout)
    assert 0 < len(replayed["decisions"]) == replayed["same"]
    info = succeed("inspect", "--replay", log).stdout
    assert f"{replayed['same']} of {replayed['same']} decisions are as recorded" in info


def test_color_underlines_accepted_drafts_and_changes_no_character(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP)
    plain, shown = document(*common), succeed(*common, "--color").stdout
    pieces = re.findall(r"\x1b\[4;32m(.*?)\x1b\[0m|([^\x1b])", shown, flags=re.DOTALL)
    assert "".join(drafted or other for drafted, other in pieces) == plain["text"]
    for (drafted, other), origin in zip(pieces, plain["origin"], strict=True):  # one id is one character
        assert other == "\n" or bool(drafted) == (origin == "draft")
    assert sum(bool(drafted) for drafted, _ in pieces) > 3


def test_what_stdout_cannot_encode_is_replaced_in_a_text() -> None:
    request = ["generate", "--prompt", "é", "--max-new-tokens", "4", "--method", "autoregressive"]
    right = document(*request)["text"]
    assert not right.isascii()
    shown = CliRunner(charset="ascii").invoke(program(), request)
    assert (shown.exit_code, shown.stdout) == (0, right.encode("ascii", "replace").decode())


def test_on_a_terminal_drafts_are_marked_unless_no_color_is_set(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    for shown in ("\x1b[4;32mH\x1b[0m\nI\n", "H\nI\n"):
        monkeypatch.setattr(sys, "stdout", screen := Screen())
        painter = TokenPrinter(job(folder), None)
        painter.show(Step([[40, 95, 41]], [["draft", "draft", "recovered"]], [0], [0], [0], [0]))
        painter.end()
        assert screen.getvalue() == shown
        monkeypatch.setenv("NO_COLOR", "1")


def test_a_models_control_characters_cannot_drive_a_terminal() -> None:
    assert terminal.harmless("a\x1b[2J\x07\r\x9b\x7f\n\tü") == "a␛[2J␇␍\ufffd␡\n\tü"


def test_sampling_repeats_with_its_seed(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, *LAYERSKIP, "--max-new-tokens", 24, "--temperature", 1)
    first, again, other = (document(*common, "--top-k", 20, "--seed", seed) for seed in (1, 1, 2))
    assert first["tokens"] == again["tokens"] != other["tokens"]
    assert first["decoding"] == {"max_new_tokens": 24, "do_sample": True, "temperature": 1.0, "top_k": 20, "seed": 1}
    drawn = document(*common)
    assert document(*common, "--seed", drawn["decoding"]["seed"])["tokens"] == drawn["tokens"]


@pytest.fixture
def interrupted(hears_ctrl_c: None, monkeypatch: pytest.MonkeyPatch) -> None:
    real = skipstone.stream

    def impatient(*arguments: Any, **options: Any) -> Any:
        for number, step in enumerate(real(*arguments, **options)):
            if number == 4:
                signal.raise_signal(signal.SIGINT)
            yield step

    monkeypatch.setattr(skipstone, "stream", impatient)


@pytest.mark.usefixtures("interrupted")
def test_interrupted_it_prints_what_there_is_and_exits_with_130(folder: Path) -> None:
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, *LAYERSKIP)
    result, as_json = run(*common, "--stats"), run(*common, "--json")
    tokens, text = expected(folder)
    assert result.exit_code == as_json.exit_code == 130
    assert 4 <= len(result.stdout.rstrip("\n")) < len(text)
    assert text.startswith(result.stdout.rstrip("\n"))
    assert "ended by interrupted" in result.stderr
    assert "Traceback" not in result.stderr
    found = json.loads(as_json.stdout)
    assert found["finish_reason"] == "interrupted"
    assert 4 <= len(found["tokens"]) < 24
    assert found["tokens"] == tokens[: len(found["tokens"])]


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error_message(folder: Path) -> None:
    options = (*LAYERSKIP, "--prompt", PROMPT, "--max-new-tokens", "100000", "--ignore-eos")
    command, pipe = [sys.executable, "-m", "skipstone", "generate", str(folder), *options], subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(5)
    process.stdout.close()
    assert process.wait(timeout=120) not in (0, 130)
    assert process.stderr.read() == b""


def test_public_names_are_the_same_for_type_checkers_and_at_run_time() -> None:
    tree = ast.parse(Path(skipstone.__file__).read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module.startswith("skipstone.")]
    declared = {(node.module, alias.asname) for node in imports for alias in node.names}
    assert declared == {(f"skipstone.{module}", name) for name, module in skipstone._HOME.items()}
    assert all(getattr(skipstone, name) is not None for _, name in declared)
    assert {name for _, name in declared} <= set(dir(skipstone))
