"""Bad input on the command line: one sentence, no traceback, an exit code. Warnings: one line."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from skipstone.decoding import verify
from skipstone.decoding.stats import Stats
from skipstone.hf import api
from tests.helpers.commandline import LAYERSKIP, PROMPT, assert_refused, run, succeed


def _truncate(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])


def _drop_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _add_a_tensor(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    tensors["model.layers.0.self_attn.q_norm.weight"] = tensors["model.norm.weight"][:8].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _another_type(kind: str | None) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        del config["model_type"]
        (path / "config.json").write_text(json.dumps(config if kind is None else config | {"model_type": kind}))

    return change


def _wider(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"intermediate_size": 128}))


def _no_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def _unknown_activation(path: Path) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"hidden_act": "wobble"}))


def _only_a_gguf(path: Path) -> None:
    (path / "config.json").rename(path / "model.gguf")


def _broken_config(path: Path) -> None:
    (path / "config.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (_truncate, "a file is corrupt"),
        (_drop_a_tensor, "lacks model.norm.weight"),
        (_add_a_tensor, "it has model.layers.0.self_attn.q_norm.weight, expected only what a LlamaForCausalLM of 4 layers"),
        (_another_type("clip"), "transformers loads clip models by neither"),
        (_another_type(None), "has no model_type, expected"),
        (_wider, "has shape [32, 64], expected [32, 128]"),
        (_no_weights, "no file named model.safetensors"),
        (_broken_config, "not a valid JSON file"),
        (_unknown_activation, "hidden_act = 'wobble'"),
        (_only_a_gguf, "it has no config.json; a model is such a folder, a .gguf file or a hub id; did you mean"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_checkpoints_that_cannot_be_used(variant: Callable[..., Path], damage: Callable[[Path], None], part: str) -> None:
    path = variant()
    damage(path)
    assert_refused(run("generate", path, "--prompt", "x", *LAYERSKIP), part)


@pytest.mark.slow  # a process of its own: a server closes the streams that it logs to
@pytest.mark.parametrize("damage", [_truncate, _broken_config, _unknown_activation])
def test_a_server_of_such_a_checkpoint_ends_with_the_same_code(
    variant: Callable[..., Path], damage: Callable[[Path], None]
) -> None:
    path = variant()
    damage(path)
    command = [sys.executable, "-m", "skipstone", "serve", str(path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


CONFIG = "--prompt x --speculative-config"
BAD = [
    # the prompt
    ("", "the prompt is empty"),
    ("--prompt ''", "the prompt is empty"),
    ("--prompt x --prompt-file y", "not both"),
    ("--prompt-file nowhere.txt", "nowhere.txt: No such file"),
    ("--prompt-file .", ".: Is a directory"),
    (f"--prompt {'x' * 131070}", "prompt of 131070 tokens + max_new_tokens=8 is more than the model's 131072 positions"),
    ("--prompt x --chat --prompt-tokens 3", "chat template"),
    ("--prompt x --prompt-tokens 0", "--prompt-tokens"),
    ("--prompt x --seed 3", "--seed has no effect at temperature 0"),
    ("--prompt x --json --stats", "--json holds what --stats prints"),
    ("--prompt x --json --explain", "--explain prints a table, --json prints none"),
    # the method
    ("--prompt x --method 'layerskip exit_layer=4'", "between 1 and 3 for a model of 4 layers, found 4"),
    ("--prompt x --method 'layerskip exit_layer=0'", "at least 1, found 0"),
    ("--prompt x --method layerskip", "exit_layer is not set"),
    (
        "--prompt x --method 'early_exit num_speculative_tokens=3'",
        "early_exit has no setting 'num_speculative_tokens'; it has exit_layer (num_speculative_tokens is a setting of "
        "layerskip, swift, self_speculative, adadecode, speculative, adasd, prompt_lookup, jacobi, recycle)",
    ),
    (
        "--prompt x --method 'autoregressive exit_layer=2'",
        "autoregressive has no setting 'exit_layer'; it has none (exit_layer is a setting of early_exit, layerskip)",
    ),
    ("--prompt x --method 'layerskip exit_layer=2 num_speculative_tokens=0'", "at least 1, found 0"),
    ("--prompt x --method 'layerskip exit_layer=2 confidence_threshold=2'", "in [0, 1]"),
    ("--prompt x --method 'layerskip exit_layer=2 confidence_threshold=high'", "takes float|adaptive|none, found 'high'"),
    ("--prompt x --method 'layerskip exit_layer=2 reuse_cache=maybe'", "takes true|false, found 'maybe'"),
    ("--prompt x --method 'layerskip exit_layer'", "settings of a method are key=value; found 'exit_layer' after layerskip"),
    ("--prompt x --method 'layerskip exit_layer=1 exit_layer=2'", "exit_layer is given twice after layerskip"),
    ("--prompt x --method ''", "a method is a name with settings, such as `layerskip exit_layer=4`; found nothing"),
    ("""--prompt x --method "self_speculative profile='a b" """, "a quote is not closed in"),
    ("--prompt x --method '{layerskip}'", "a method that begins with a brace is a JSON object"),
    (f"{CONFIG} '{{'", "--speculative-config is not JSON"),
    (f"{CONFIG} []", "must be an object"),
    (f'{CONFIG} \'{{"method": ["a"]}}\'', "unknown method ['a']"),
    (
        f'{CONFIG} \'{{"method": "layerskip", "exit_layer": 2, "depth": 1}}\'',
        "layerskip has no setting 'depth'; it has exit_layer",
    ),
    (f'{CONFIG} \'{{"method": "layerskip", "exit_layer": "2"}}\'', "must be an integer, found '2'"),
    (
        f'{CONFIG} \'{{"method": "layerskip", "exit_layer": 2}}\' --method "exit_layer=3"',
        "--method says exit_layer=3, --speculative-config says 2",
    ),
    (f'{CONFIG} \'{{"method": "layerskip"}}\' --method early_exit', "--method says 'early_exit'"),
    # decoding and output
    ("--prompt x --max-new-tokens 0", "--max-new-tokens"),
    ("--prompt x --temperature -1", "--temperature"),
    ("--prompt x --top-k 3", "--top-k has no effect at temperature 0"),
    ("--prompt x --temperature 1 --top-p 2", "--top-p"),
    ("--prompt x --stop ''", "--stop takes a text"),
    ("--prompt x --repeat 2", "--compare"),
    ("--prompt x --json --color", "--color"),
    # the model and the machine
    ("--prompt x --dtype int8", "--dtype must be one of auto, float32"),
    ("--prompt x --device abacus", "device 'abacus' cannot be used here"),
    # flags that there are not
    ("--prompt x --exit-layr 2", "No such option: --exit-layr (Possible options: --explain) (see skipstone generate --help)"),
    ("--prompt x --exit-layer 2", '--method "layerskip exit_layer=..."'),
    (
        "--prompt x --stop-threshold 0.5",
        'settings are part of the method: --method "self_speculative confidence_threshold=..."',
    ),
]


@pytest.mark.parametrize(("flags", "part"), BAD, ids=[flags[:60] for flags, _ in BAD])
def test_bad_input_is_one_sentence(folder: Path, flags: str, part: str) -> None:
    given = shlex.split(flags)
    defaults = [] if "--method" in flags or "--speculative-config" in flags else [*LAYERSKIP]
    limit = [] if "--max-new-tokens" in flags else ["--max-new-tokens", "8"]
    assert_refused(run("generate", folder, *given, *defaults, *limit), part)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["nope"], "No such command 'nope'"),
        (["--nope"], "No such option"),
        (["methods", "--nope"], "No such option"),
        (["generate", "config.json"], "a model is a folder, this is a file"),
    ],
)
def test_bad_verbs_are_one_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], part: str) -> None:
    monkeypatch.chdir(folder)
    assert_refused(run(*arguments, *(["--prompt", "x", *LAYERSKIP] if "config.json" in arguments else [])), part)


def test_a_model_without_a_default_needs_a_method(folder: Path) -> None:
    assert_refused(
        run("generate", folder, "--prompt", "x", "--method", "exit_layer=2"),
        "'exit_layer=2' names no method; there are auto, autoregressive, early_exit",
    )


def test_chat_needs_a_template(variant: Callable[..., Path]) -> None:
    path = variant()
    (path / "chat_template.jinja").unlink()
    assert_refused(run("generate", path, "--prompt", "x", "--chat", *LAYERSKIP), "no chat template")


def test_bytes_that_are_no_text(folder: Path) -> None:
    assert_refused(run("generate", folder, *LAYERSKIP, stdin=b"abc\xff"), "standard input is not UTF-8 (byte 3 is 0xff)")


def test_debug_shows_the_traceback_and_keeps_the_exit_code(folder: Path) -> None:
    result = run("generate", folder, "--prompt", "x", "--method", "layerskip exit_layer=9", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("found 9\n")


def test_a_defect_is_one_line_too_but_not_the_users(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("out of\nluck")

    monkeypatch.setattr(verify, "match_greedy", broken)
    result = run("generate", folder, "--prompt", "x", *LAYERSKIP)
    assert result.exit_code == 1
    assert result.stderr == "skipstone: RuntimeError: out of luck (--debug shows where)\n"


def test_own_warnings_are_one_line_and_libraries_keep_quiet(variant: Callable[..., Path]) -> None:
    noisy = variant("generation_config.json", temperature=0.7, top_k=5, cache_implementation="dynamic")
    config = '{"method": "layerskip", "exit_layer": 2, "num_assistant_tokens": 3}'
    result = succeed("generate", noisy, "--prompt", "x", "--speculative-config", config, "--max-new-tokens", 3)
    assert result.stderr == "skipstone: warning: num_assistant_tokens is called num_speculative_tokens in skipstone\n"


def test_a_run_slower_than_plain_decoding_says_so_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stats, "speed_up_bound", 0.5)
    monkeypatch.setattr(api, "_warned", False)
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 120, "--ignore-eos", *LAYERSKIP)
    assert re.fullmatch(r"skipstone: warning: layerskip ran at 0\.50 x [^\n]+\n", succeed(*common).stderr)
    assert "0.50 x" not in succeed(*common).stderr
    monkeypatch.setattr(api, "_warned", False)
    assert "0.50 x" not in succeed(*common, "--compare").stderr, "--compare measures it instead"
