"""Bad input on the command line: one sentence, an exit code, and before torch is imported where no model is needed."""

import json
import os
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

import skipstone
from skipstone.cli import VERBS, bench, export, method_table, train
from skipstone.decoding import verify
from skipstone.decoding.stats import Stats
from skipstone.export.gguf.write_gguf import TYPES
from skipstone.hf import api
from skipstone.lab.bench.peers import PEERS
from skipstone.lab.bench.report.report import FORMATS
from skipstone.lab.bench.report.tables import LAYOUTS
from skipstone.methods import METHODS, known
from skipstone.train.heads.recipe import PRESETS
from skipstone.train.layerskip.estimate import SHAPES
from tests.helpers.commandline import LAYERSKIP, PROMPT, assert_refused, run, succeed
from tests.helpers.pairwise import slow_except

RUN_ALL = """
import contextlib, io, json, sys
from typer.main import get_command
from skipstone.cli import app
program, results = get_command(app), []
for arguments in json.loads(sys.argv[1]):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            program(arguments)
        except SystemExit as exit:
            code = exit.code
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    results.append([arguments, code, stderr.getvalue(), heavy])
print(json.dumps(results))
"""
VERBS_WITH_A_MODEL = ("chat", "check", "demo", "inspect", "costs", "search", "tune", "serve", "bench run")
VERBS_WITH_A_METHOD = (
    "chat",
    "check",
    "tune",
    "inspect",
    "serve",
    "bench run",
    "generate --prompt x",
    "batch requests.jsonl out.jsonl",
)
VERBS_WITH_A_METHOD += ("export skipstone-nano out", "bench surrogate llama-3.2-1b")
MISTAKES: list[tuple[str, str]] = [
    # (arguments, a word of the message)
    *((f"{verb} ./nowhere", "nowhere") for verb in VERBS_WITH_A_MODEL),
    ("generate ./nowhere --prompt x", "nowhere"),
    ("generate org/name --prompt x", "org/name"),
    ("push ./nowhere org/name", "nowhere"),
    ("export ./nowhere out", "nowhere"),
    *((f"{verb} --method layerskp", "'layerskip'") for verb in VERBS_WITH_A_METHOD),
    *((f"{verb} --prompts nowhere.jsonl", "nowhere.jsonl") for verb in ("check", "search", "tune")),
    ("batch requests.jsonl out.jsonl --model ./nowhere", "nowhere"),
    ("nope", "nope"),
    ("genrate", "generate"),
    ("generate --promt x", "--prompt"),
    ("generate --exit-layer 2 --prompt x", "layerskip exit_layer="),
    ("generate --max-new-tokens many --prompt x", "integer"),
    ("generate --dtype float31 --prompt x", "float32"),
    ("generate --engine natve --prompt x", "native"),
    ("generate --method {method:layerskp} --prompt x", "JSON"),
    ("generate --method layerskip,exit_layr=2 --prompt x", "'exit_layer'"),
    ("generate --method auto,candidates=layerskp;recycle --prompt x", "'layerskip'"),
    ('generate --speculative-config {"method":"layerskip","exit_layr":2} --prompt x', "'exit_layer'"),
    ("generate", "empty"),
    ("generate --prompt-file nowhere.txt", "nowhere.txt"),
    ("generate --prompt-file latin.txt", "UTF-8"),
    ("generate empty --prompt x", "config.json"),
    ("generate no.gguf --prompt x", "GGUF"),
    ("check --prompts good.yaml", ".jsonl"),
    ("demo --svg nowhere/picture.svg", "nowhere"),
    ("inspect --out nowhere/picture.png", "nowhere"),
    ("inspect --out picture.gif", ".png"),
    ("inspect --replay nowhere.jsonl", "nowhere.jsonl"),
    ("search --out nowhere/profile.json", "nowhere"),
    ("serve --port 99999", "65535"),
    ("serve --log-format jsn", "json"),
    ("serve --replicas 2", "need --ray"),
    ("serve --ray-address 127.0.0.1:1", "need --ray"),
    ("serve --cpus-per-replica 2", "need --ray"),
    ("serve --ray --replicas 2 --min-replicas 1", "--replicas is a number that stays"),
    ("serve --ray --min-replicas 3 --max-replicas 2", "--min-replicas 3 is more than --max-replicas 2"),
    ("serve --ray --port 0", "--port 0 is no port"),
    ("batch nowhere.jsonl out.jsonl", "nowhere.jsonl"),
    ("batch requests.jsonl nowhere/out.jsonl", "nowhere"),
    ("push empty name", "ORG/NAME"),
    ("export skipstone-nano empty", "empty"),
    ("export skipstone-nano out --to ggfu", "gguf"),
    ("methods layerskp", "'layerskip'"),
    ("bench rn", "run"),
    ("bench run --task humanevl", "'humaneval'"),
    ("bench run --protocol layerskp", "'layerskip'"),
    ("bench run --plan nowhere.yaml", "nowhere.yaml"),
    ("bench run --plan broken.yaml", "YAML"),
    ("bench run --data-dir nowhere", "nowhere"),
    ("bench run --out nowhere/results.jsonl", "nowhere"),
    ("bench report nowhere.jsonl", "nowhere.jsonl"),
    ("bench report requests.jsonl", "requests.jsonl"),
    ("bench report requests.jsonl --layout tsks", "tasks"),
    ("bench compare nowhere.jsonl requests.jsonl", "nowhere.jsonl"),
    ("train layerskip nowhere.yaml", "nowhere.yaml"),
    ("train layerskip broken.yaml", "YAML"),
    ("train layerskip good.yaml --dry-run --shape 2B", "8B"),
    ("train heads", "--recipe"),
    ("train heads --prompts requests.jsonl", "--output"),
    ("train heads --prompts nowhere.jsonl --output out", "nowhere.jsonl"),
    ("train heads --prompts requests.jsonl --output out --preset quik", "quick"),
    ("train heads ./nowhere --prompts requests.jsonl --output out", "nowhere"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("place")
    (path / "empty").mkdir()
    (path / "latin.txt").write_bytes(b"\xe9")
    (path / "no.gguf").write_bytes(b"nothing")
    (path / "broken.yaml").write_text("{")
    (path / "good.yaml").write_text("a: 1\n")
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    (path / "requests.jsonl").write_text(json.dumps(line) + "\n")
    return path


HELP = [["--help"], *([verb, "--help"] for verb in VERBS), ["bench", "run", "--help"], ["train", "heads", "--help"]]


@pytest.fixture(scope="module")
def results(place: Path) -> list[tuple[list[str], int, str, list[str]]]:
    """Arguments, exit code, standard error and heavy modules of every command, all of them in one process."""
    commands = [[word.replace(",", " ", "{" not in word) for word in text.split()] for text, _ in MISTAKES]
    commands += [["--version"], *HELP]
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": source}
    command = [sys.executable, "-c", RUN_ALL, json.dumps(commands)]
    done = subprocess.run(
        command, cwd=place, env=environment, input="", capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


def test_mistakes_are_told_before_torch_is_imported(results: Any) -> None:
    for (given, code, stderr, heavy), (_, word) in zip(results, MISTAKES, strict=False):
        assert code == 2, (given, code, stderr)
        assert stderr.startswith("skipstone: "), (given, stderr)
        assert stderr.count("\n") == 1, (given, stderr)
        assert word in stderr, (given, stderr)
        assert heavy == [], (given, heavy, stderr)


@pytest.mark.parametrize("group", ["bench", "train"])
def test_a_group_without_a_verb_shows_its_help_and_nothing_else(group: str) -> None:
    result = run(group)
    assert "Usage" in result.output
    assert "skipstone: " not in result.output


def test_help_imports_no_torch(results: Any) -> None:
    result = results[len(MISTAKES) :]
    assert len(result) == 1 + len(HELP)
    assert all(code == 0 and not heavy for _, code, _, heavy in result), result
    assert run("--version").stdout == f"skipstone {skipstone.__version__}\n"


def test_the_table_of_names_is_that_of_the_classes() -> None:
    """Read from their source as by a process that has not imported them. The flag `lossless` errs on the side of a change."""
    for folder, kinds in (("methods", METHODS), ("lab/bench/peers", PEERS)):
        table = method_table.read_names(method_table.PACKAGE / folder)
        classes = known(kinds)
        assert {name: (about.settings, about.aliases) for name, about in table.items()} == {
            name: (about.settings, about.aliases) for name, about in classes.items()
        }
    names = method_table.read_names(method_table.PACKAGE / "methods")
    assert all(kind().lossless for name, kind in METHODS.items() if names[name].lossless)


def test_values_that_are_known_without_torch_are_those_of_the_rooms() -> None:
    assert bench.FORMATS == FORMATS
    assert set(bench.LAYOUTS) == set(LAYOUTS)
    assert set(train.SHAPES) == set(SHAPES)
    assert set(train.PRESETS) == set(PRESETS)
    assert tuple(TYPES.values()) == export.TYPES


def _truncate(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])


def _tensors(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    return damage


def _config(**changes: Any) -> Callable[[Path], None]:
    """Other fields of config.json; None takes one away."""

    def damage(path: Path) -> None:
        config = json.loads((path / "config.json").read_text()) | changes
        (path / "config.json").write_text(json.dumps({name: value for name, value in config.items() if value is not None}))

    return damage


def _broken_config(path: Path) -> None:
    (path / "config.json").write_text("{")


_unknown_activation = _config(hidden_act="wobble")


@pytest.mark.parametrize(
    ("damage", "part"),
    [
        (_truncate, "a file is corrupt"),
        (_tensors(lambda tensors: tensors.pop("model.norm.weight")), "lacks model.norm.weight"),
        (
            _tensors(lambda tensors: tensors.update({"a.weight": tensors["model.norm.weight"][:8].clone()})),
            "it has a.weight, expected only what a LlamaForCausalLM of 4 layers",
        ),
        (_config(model_type="clip"), "transformers loads clip models by neither"),
        (_config(model_type=None), "has no model_type, expected"),
        (_config(intermediate_size=128), "has shape [32, 64], expected [32, 128]"),
        (lambda path: (path / "model.safetensors").unlink(), "no file named model.safetensors"),
        (_broken_config, "not a valid JSON file"),
        (_unknown_activation, "hidden_act = 'wobble'"),
        (
            lambda path: (path / "config.json").rename(path / "model.gguf"),
            "it has no config.json; a model is such a folder, a .gguf file or a hub id; did you mean",
        ),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_checkpoints_that_cannot_be_used(variant: Callable[..., Path], damage: Callable[[Path], None], part: str) -> None:
    path = variant()
    damage(path)
    assert_refused(run("generate", path, "--prompt", "x", *LAYERSKIP), part)


# in a process of its own: a server closes the streams that it logs to
@pytest.mark.parametrize("damage", slow_except((), [_truncate, _broken_config, _unknown_activation], full=[_truncate]))
def test_a_server_of_such_a_checkpoint_ends_with_the_same_code(
    variant: Callable[..., Path], damage: Callable[[Path], None]
) -> None:
    path = variant()
    damage(path)
    command = [sys.executable, "-m", "skipstone", "serve", str(path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "the model could not be loaded" in line]
    assert "variant" in line
    assert "Traceback" not in done.stderr


CONFIG = "--prompt x --speculative-config"
BAD = [
    ("--prompt ''", "the prompt is empty"),
    ("--prompt x --prompt-file y", "not both"),
    ("--prompt-file .", ".: Is a directory"),
    ("--prompt x --chat --prompt-tokens 3", "chat template"),
    ("--prompt x --seed 3", "--seed has no effect at temperature 0"),
    ("--prompt x --json --stats", "--json holds what --stats prints"),
    ("--prompt x --json --explain", "--explain prints a table, --json prints none"),
    # the method
    ("--prompt x --method 'layerskip exit_layer=4'", "between 1 and 3 for a model of 4 layers, found 4"),
    ("--prompt x --method layerskip", "exit_layer is not set"),
    ("--prompt x --method 'autoregressive exit_layer=2'", "autoregressive has no setting 'exit_layer'; it has none"),
    ("--prompt x --method 'layerskip exit_layer=2 reuse_cache=maybe'", "takes true|false, found 'maybe'"),
    ("--prompt x --method 'layerskip exit_layer'", "settings of a method are key=value; found 'exit_layer' after layerskip"),
    ("""--prompt x --method "self_speculative profile='a b" """, "a quote is not closed in"),
    (f"{CONFIG} '{{'", "--speculative-config is not JSON"),
    (f'{CONFIG} \'{{"method": ["a"]}}\'', "unknown method ['a']"),
    (f'{CONFIG} \'{{"method": "layerskip", "exit_layer": 2}}\' --method "exit_layer=3"', "says exit_layer=3"),
    (f'{CONFIG} \'{{"method": "layerskip"}}\' --method early_exit', "--method says 'early_exit'"),
    # decoding and output
    ("--prompt x --temperature -1", "--temperature"),
    ("--prompt x --top-k 3", "--top-k has no effect at temperature 0"),
    ("--prompt x --stop ''", "--stop takes a text"),
    ("--prompt x --repeat 2", "--compare"),
    ("--prompt x --json --color", "--color"),
    # the model and the machine
    ("--prompt x --device abacus", "device 'abacus' cannot be used here"),
    ("--prompt x --stop-threshold 0.5", '--method "self_speculative confidence_threshold=..."'),
]


@pytest.mark.parametrize(("flags", "part"), BAD, ids=[flags[:60] for flags, _ in BAD])
def test_bad_input_is_one_sentence(folder: Path, flags: str, part: str) -> None:
    given = shlex.split(flags)
    defaults = [] if "--method" in flags or "--speculative-config" in flags else [*LAYERSKIP]
    limit = [] if "--max-new-tokens" in flags else ["--max-new-tokens", "8"]
    assert_refused(run("generate", folder, *given, *defaults, *limit), part)


def test_a_model_without_a_default_or_a_template_and_bytes_that_are_no_text(variant: Callable[..., Path]) -> None:
    path = variant()
    (path / "chat_template.jinja").unlink()
    said = "'exit_layer=2' names no method; there are auto, autoregressive, early_exit"
    assert_refused(run("generate", path, "--prompt", "x", "--method", "exit_layer=2"), said)
    assert_refused(run("generate", path, "--prompt", "x", "--chat", *LAYERSKIP), "no chat template")
    assert_refused(run("generate", path, *LAYERSKIP, stdin=b"abc\xff"), "standard input is not UTF-8 (byte 3 is 0xff)")


def test_debug_shows_the_traceback_and_a_defect_is_one_line_with_another_code(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run("generate", folder, "--prompt", "x", "--method", "layerskip exit_layer=9", "--debug")
    assert result.exit_code == 2
    assert "Traceback" in result.stderr
    assert result.stderr.endswith("found 9\n")

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
    monkeypatch.setattr(Stats, "speed_up_bounds", (0.5, 0.5))
    monkeypatch.setattr(api, "_warned", False)
    common = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 120, "--ignore-eos", *LAYERSKIP)
    assert re.fullmatch(r"skipstone: warning: layerskip ran at 0\.50 x [^\n]+\n", succeed(*common).stderr)
    assert "0.50 x" not in succeed(*common).stderr
    monkeypatch.setattr(api, "_warned", False)
    assert "0.50 x" not in succeed(*common, "--compare").stderr, "--compare measures it instead"
