"""Mistakes that need no model are told before torch is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from skipstone.cli import VERBS, bench, export, method_table, train
from skipstone.decoding.method_text import MethodNames
from skipstone.decoding.settings import settings_of
from skipstone.export.gguf.vocabulary import RULES
from skipstone.export.gguf.write_gguf import TYPES
from skipstone.lab.bench.peers import PEERS
from skipstone.lab.bench.report.report import FORMATS
from skipstone.lab.bench.report.tables import LAYOUTS
from skipstone.methods import METHODS
from skipstone.train.heads.recipe import PRESETS
from skipstone.train.layerskip.estimate import SHAPES
from tests.helpers.commandline import run

RUN_ALL = """
import contextlib, io, json, sys
from skipstone.cli import app
results = []
for arguments in json.loads(sys.argv[1]):
    stderr = io.StringIO()
    with contextlib.redirect_stderr(stderr), contextlib.redirect_stdout(io.StringIO()):
        try:
            app(arguments)
        except SystemExit as exit:
            code = exit.code
    heavy = [name for name in ("torch", "transformers") if name in sys.modules]
    results.append([arguments, code, stderr.getvalue(), heavy])
print(json.dumps(results))
"""
MISTAKES: list[tuple[str, str]] = [
    # (arguments, a word of the message)
    ("nope", "nope"),
    ("genrate", "generate"),
    ("generate --promt x", "--prompt"),
    ("generate --exit-layer 2 --prompt x", "layerskip exit_layer="),
    ("generate --max-new-tokens many --prompt x", "integer"),
    ("generate --dtype float31 --prompt x", "float32"),
    ("generate --engine natve --prompt x", "native"),
    ("generate --method layerskp --prompt x", "'layerskip'"),
    ("generate --method {method:layerskp} --prompt x", "JSON"),
    ("generate --method layerskip,exit_layr=2 --prompt x", "'exit_layer'"),
    ("generate --method layerskip,exit_layer=two --prompt x", "int|none"),
    ("generate --method auto,candidates=layerskp;recycle --prompt x", "'layerskip'"),
    ('generate --speculative-config {"method":"layerskp"} --prompt x', "'layerskip'"),
    ('generate --speculative-config {"method":"layerskip","exit_layr":2} --prompt x', "'exit_layer'"),
    ("generate", "empty"),
    ("generate --prompt-file nowhere.txt", "nowhere.txt"),
    ("generate --prompt-file empty.txt", "empty"),
    ("generate --prompt-file latin.txt", "UTF-8"),
    ("generate ./nowhere --prompt x", "nowhere"),
    ("generate empty --prompt x", "config.json"),
    ("generate empty.txt --prompt x", ".gguf"),
    ("generate no.gguf --prompt x", "GGUF"),
    ("chat ./nowhere", "nowhere"),
    ("chat --method layerskp", "'layerskip'"),
    ("check ./nowhere", "nowhere"),
    ("check --prompts nowhere.jsonl", "nowhere.jsonl"),
    ("check --prompts good.yaml", ".jsonl"),
    ("tune --prompts good.yaml", ".jsonl"),
    ("check --method layerskp", "'layerskip'"),
    ("demo ./nowhere", "nowhere"),
    ("demo --svg nowhere/picture.svg", "nowhere"),
    ("inspect ./nowhere", "nowhere"),
    ("inspect --out nowhere/picture.png", "nowhere"),
    ("inspect --out picture.gif", ".png"),
    ("inspect --replay nowhere.jsonl", "nowhere.jsonl"),
    ("inspect --prompt=", "empty"),
    ("costs ./nowhere", "nowhere"),
    ("costs --draft-model ./nowhere", "nowhere"),
    ("search ./nowhere", "nowhere"),
    ("search --out nowhere/profile.json", "nowhere"),
    ("search --out empty", "folder"),
    ("search --prompts nowhere.jsonl", "nowhere.jsonl"),
    ("tune ./nowhere", "nowhere"),
    ("tune --method layerskp", "'layerskip'"),
    ("tune --prompts nowhere.jsonl", "nowhere.jsonl"),
    ("serve ./nowhere", "nowhere"),
    ("serve --method layerskp", "'layerskip'"),
    ("serve --port 99999", "65535"),
    ("serve --log-format jsn", "json"),
    ("serve --replicas 2", "--ray"),
    ("batch nowhere.jsonl out.jsonl", "nowhere.jsonl"),
    ("batch requests.jsonl nowhere/out.jsonl", "nowhere"),
    ("batch requests.jsonl out.jsonl --model ./nowhere", "nowhere"),
    ("batch requests.jsonl out.jsonl --method layerskp", "'layerskip'"),
    ("push ./nowhere org/name", "nowhere"),
    ("push empty name", "ORG/NAME"),
    ("export ./nowhere out", "nowhere"),
    ("export skipstone-nano nowhere/out", "nowhere"),
    ("export skipstone-nano empty", "empty"),
    ("export skipstone-nano out --to ggfu", "gguf"),
    ("export skipstone-nano out --method layerskp", "'layerskip'"),
    ("methods layerskp", "'layerskip'"),
    ("bench rn", "run"),
    ("bench run ./nowhere", "nowhere"),
    ("bench run --method layerskp", "'layerskip'"),
    ("bench run --method hf-genrate", "'hf-generate'"),
    ("bench run --task humanevl", "'humaneval'"),
    ("bench run --protocol layerskp", "'layerskip'"),
    ("bench run --plan nowhere.yaml", "nowhere.yaml"),
    ("bench run --plan broken.yaml", "YAML"),
    ("bench run --data-dir nowhere", "nowhere"),
    ("bench run --out nowhere/results.jsonl", "nowhere"),
    ("bench run --dtype float31", "float32"),
    ("bench surrogate llama-3.2-1b --method layerskp", "'layerskip'"),
    ("bench report nowhere.jsonl", "nowhere.jsonl"),
    ("bench report requests.jsonl", "requests.jsonl"),
    ("bench report requests.jsonl --format htm", "html"),
    ("bench report requests.jsonl --layout tsks", "tasks"),
    ("bench compare nowhere.jsonl requests.jsonl", "nowhere.jsonl"),
    ("train layerskip nowhere.yaml", "nowhere.yaml"),
    ("train layerskip broken.yaml", "YAML"),
    ("train layerskip good.yaml --dry-run --shape 2B", "8B"),
    ("train heads", "--recipe"),
    ("train heads --prompts nowhere.jsonl --output out", "nowhere.jsonl"),
    ("train heads --prompts requests.jsonl --output out --preset quik", "quick"),
    ("train heads ./nowhere --prompts requests.jsonl --output out", "nowhere"),
]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with files that are wrong, each in its own way."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.txt").touch()
    (tmp_path / "latin.txt").write_bytes(b"\xe9")
    (tmp_path / "no.gguf").write_bytes(b"nothing")
    (tmp_path / "broken.yaml").write_text("{")
    (tmp_path / "good.yaml").write_text("a: 1\n")
    (tmp_path / "requests.jsonl").write_text(
        '{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}\n'
    )
    return tmp_path


def _in_one_process(place: Path, commands: list[list[str]]) -> list[tuple[list[str], int, str, list[str]]]:
    source = str(Path(__file__).parents[2] / "src")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": source}
    command = [sys.executable, "-c", RUN_ALL, json.dumps(commands)]
    done = subprocess.run(
        command, cwd=place, env=environment, input="", capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout)


def test_mistakes_are_told_before_torch_is_imported(place: Path) -> None:
    found = _in_one_process(place, [[word.replace(",", " ", "{" not in word) for word in text.split()] for text, _ in MISTAKES])
    assert len(found) == len(MISTAKES)
    for (given, code, stderr, heavy), (_, word) in zip(found, MISTAKES, strict=True):
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


def test_help_imports_no_torch(place: Path) -> None:
    commands = [[], *([verb] for verb in VERBS), ["bench", "run"], ["train", "heads"]]
    found = _in_one_process(place, [[*command, "--help"] for command in commands])
    assert all(code == 0 and not heavy for _, code, _, heavy in found), found


def test_a_model_of_the_hub_that_is_not_there_is_told_at_once(place: Path) -> None:
    ((_, code, stderr, heavy),) = _in_one_process(place, [["generate", "org/name", "--prompt", "x"]])
    assert (code, heavy) == (2, [])
    assert "org/name" in stderr


def test_the_table_of_names_is_that_of_the_classes() -> None:
    for table, kinds in ((method_table.METHODS, METHODS), (method_table.PEERS, PEERS)):
        assert _plain(table) == _plain({name: _of_class(kind) for name, kind in kinds.items()})
    assert {name for name, kind in METHODS.items() if kind().lossless} == {
        name for name, about in method_table.METHODS.items() if about.lossless
    }


def _of_class(kind: type) -> MethodNames:
    return MethodNames({one.name: one.type for one in settings_of(kind).values()}, getattr(kind, "aliases", {}))


def _plain(table: Mapping[str, MethodNames]) -> list[tuple[str, dict[str, str], dict[str, str]]]:
    return [(name, dict(about.settings), dict(about.aliases)) for name, about in table.items()]


def test_values_that_are_known_without_torch_are_those_of_the_rooms() -> None:
    assert bench.FORMATS == FORMATS
    assert set(bench.LAYOUTS) == set(LAYOUTS)
    assert set(train.SHAPES) == set(SHAPES)
    assert set(train.PRESETS) == set(PRESETS)
    assert (tuple(TYPES), tuple(RULES)) == (export.TYPES, export.RULES)
