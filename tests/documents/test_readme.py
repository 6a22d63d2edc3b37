"""README.md does what it says, on a tiny model: its Python, its cheap command lines, its tree, its tables."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import skipstone
from skipstone.check.check import Checker
from skipstone.cli import app
from tests.helpers.snippets import MODEL, ROOT, blocks, run_python, table_rows, tiny_checkpoint, tree

README = ROOT / "README.md"
TOKENS = 64
SHORT = {
    "generate": ["--max-new-tokens", "12"],
    "check": ["--num-prompts", "2", "--max-new-tokens", "8", "--samples", "100"],
    "inspect": ["--max-new-tokens", "4"],
    "bench": ["--num-prompts", "2", "--tune-prompts", "2", "--tune-tokens", "4", "--max-new-tokens", "8"],
}
"""What keeps a command of the README short."""

pytestmark = pytest.mark.filterwarnings("ignore:.* x the speed of plain decoding:RuntimeWarning")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def commands() -> list[list[str]]:
    """The shell lines of the README as words, comments dropped."""
    lines = [line for block in blocks(README, "sh") for line in block.code.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def skipstone_commands() -> list[list[str]]:
    return [words[1:] for words in commands() if Path(words[0]).name == "skipstone"]


@pytest.fixture(scope="module")
def executed(checkpoint) -> tuple[dict[str, Any], str]:
    """What the README's Python leaves behind, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run = run_python(README, checkpoint)
    return run, printed.getvalue()


def test_python_runs_and_drafting_leaves_the_text_alone(executed):
    run, _ = executed
    model, tokenizer, out = run["model"], run["tokenizer"], run["out"]
    plain = skipstone.generate(model, "def fibonacci(n):", "autoregressive", tokenizer=tokenizer, max_new_tokens=TOKENS)
    assert out.text == plain.text
    assert out.lossless
    assert out.stats.accepted > 0
    assert torch.equal(run["ids"], plain.sequences), "custom_generate"
    assert torch.equal(run["stopped"][0], plain.sequences[0, : run["stopped"].shape[1]]), "enable"
    assert "generate" not in vars(model), "disable gives model.generate back"


def test_stream_snippet_names_every_origin_that_occurs(executed):
    _, printed = executed
    (remark,) = (line for block in blocks(README, "python") for line in block.code.splitlines() if "# origin:" in line)
    for origin in ("prefill", "draft", "recovered", "bonus"):
        assert f'"{origin}"' in remark
    seen = {word for word in ("prefill", "draft", "recovered", "bonus") if f"'{word}'" in printed}
    assert {"prefill", "draft", "recovered"} <= seen


@pytest.mark.parametrize("words", skipstone_commands(), ids=lambda words: " ".join(words[:2]))
def test_command_line_runs(words, checkpoint, monkeypatch, capsys, tmp_path):
    """In this process, through the console script's entry point. `check` makes two probes: in tests/cli it makes all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Checker, "_probes", lambda self, real=Checker._probes: real(self)[:2])
    Path("prompts.jsonl").write_text('{"prompt": "def f("}\n{"prompt": "import"}\n')
    body = {"prompt": "def f(", "max_tokens": 4}
    request = {"custom_id": "one", "method": "POST", "url": "/v1/completions", "body": body}
    Path("requests.jsonl").write_text(json.dumps(request) + "\n")
    (script,) = entry_points(group="console_scripts", name="skipstone")
    arguments = [str(checkpoint) if word == MODEL else word for word in words]
    arguments += SHORT.get(words[0], [])
    monkeypatch.setattr(sys, "argv", ["skipstone", *arguments])
    with pytest.raises(SystemExit) as left:
        script.load()()
    printed = capsys.readouterr()
    assert left.value.code in (0, None), printed.err
    assert printed.out.strip()
    if "--compare" in words:
        assert "identical" in printed.out + printed.err
    if words[0] == "batch":
        assert json.loads(Path(words[2]).read_text())["response"]["status_code"] == 200
    if words == ["--version"]:
        assert skipstone.__version__ in printed.out
    if words == ["methods"]:
        assert all(name in printed.out for name in skipstone.METHODS)


def test_every_other_command_is_a_target_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    others = [words for words in commands() if Path(words[0]).name != "skipstone"]
    assert {words[0] for words in others} == {"make"}
    assert {words[1] for words in others} == {"demo", "serve", "quick", "test", "test-all", "test-native", "lint", "bench"}
    assert all(f"\n{target}: " in makefile for _, target, *_ in others)


def test_methods_table_says_which_methods_are_lossy():
    """A method may be young and not in the table yet: `skipstone methods` lists all."""
    rows = {row[0].strip("`"): row[-1] for row in table_rows(README) if row[0].strip("`") in skipstone.METHODS}
    assert len(rows) > 5
    for name, remark in rows.items():
        assert ("lossless = False" in remark) == (not skipstone.METHODS[name]().lossless)


def test_the_table_of_models_is_what_the_command_prints():
    printed = CliRunner().invoke(app, ["families", "--markdown"])
    assert printed.exit_code == 0
    written = (ROOT / "docs" / "models.md").read_text().split("<!-- families -->")[1]
    assert printed.output.strip() in written
    assert printed.output.count("| tested |") >= 85


def test_tree_names_what_is_there():
    (block,) = blocks(README, "text")
    entries = tree(block.code)
    assert all(remark for remark in entries.values())
    for path in entries:
        found = ROOT / path
        assert found.is_dir() if path.endswith("/") else found.is_file(), f"{path} is not there"


def test_tree_misses_no_directory_of_sources():
    (block,) = blocks(README, "text")
    named = set(tree(block.code))
    tops = [path for path in ROOT.iterdir() if path.is_dir() and path.name not in ("build", "dist", "runs")]
    tops = [path for path in tops if path.name == ".ci" or not path.name.startswith(".")]
    files = [file for top in tops for kind in ("*.py", "*.md", "run") for file in top.rglob(kind)]
    present = {file.parent.relative_to(ROOT) for file in files}
    mirrored = {Path("tests", *path.parts[2:]) for path in present if path.parts[:2] == ("src", "skipstone")}
    told = {Path(path) for path in named} | mirrored | {Path("src"), Path("tests/api")}
    above = told - {Path("tests"), Path("src/skipstone")}
    assert {path for path in present if path not in told and path.parent not in above} == set()


def test_files_that_the_package_metadata_names_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (ROOT / project["readme"]).read_text().startswith(f"# {project['name']}\n")
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert project["version"] == skipstone.__version__
