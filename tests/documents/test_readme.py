"""README.md and docs/quick-start.md do what they say, on a tiny model: their Python, their command lines, their tables."""

import contextlib
import io
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
from skipstone.cli import app
from skipstone.lab.check.check import Checker
from tests.helpers.snippets import MODEL, ROOT, blocks, run_python, table_rows, tiny_checkpoint

README = ROOT / "README.md"
QUICK_START = ROOT / "docs" / "quick-start.md"
TOKENS = 64
SHORT = {
    "generate": ["--max-new-tokens", "12"],
    "check": ["--num-prompts", "2", "--max-new-tokens", "8", "--samples", "100"],
    "inspect": ["--max-new-tokens", "4"],
    "bench": ["--num-prompts", "1", "--tune-prompts", "1", "--tune-tokens", "2", "--max-new-tokens", "4"],
}
"""What keeps a command of these pages short."""
LONG = ("bench", "check", "costs", "train")
"""What still takes more than half a second."""

pytestmark = pytest.mark.filterwarnings("ignore:.* x the speed of plain decoding:RuntimeWarning")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


def commands() -> list[list[str]]:
    """The shell lines of both pages as words, comments dropped."""
    lines = [line for page in (README, QUICK_START) for block in blocks(page, "sh") for line in block.code.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def skipstone_commands() -> list[list[str]]:
    return [words[1:] for words in commands() if Path(words[0]).name == "skipstone"]


@pytest.fixture(scope="module")
def executed(checkpoint) -> tuple[dict[str, Any], str]:
    """What the quick start's Python leaves behind, and what it prints."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        run = run_python(QUICK_START, checkpoint)
    return run, printed.getvalue()


def test_python_runs_and_drafting_leaves_the_text_alone(executed, checkpoint):
    for run in (executed[0], run_python(README, checkpoint)):
        model, out = run["model"], run["out"]
        options = {"tokenizer": run["tokenizer"], "max_new_tokens": TOKENS}
        plain = skipstone.generate(model, "def fibonacci(n):", "autoregressive", **options)
        assert out.text == plain.text
        assert out.lossless
        assert out.stats.accepted > 0
        assert torch.equal(run["ids"], plain.sequences), "custom_generate, and enable"
    run = executed[0]
    model, options = run["model"], {"tokenizer": run["tokenizer"], "max_new_tokens": TOKENS}
    plain = skipstone.generate(model, "def fibonacci(n):", "autoregressive", **options)
    assert torch.equal(run["stopped"][0], plain.sequences[0, : run["stopped"].shape[1]]), "enable"
    assert "generate" not in vars(model), "disable gives model.generate back"


def test_quick_start_shows_the_bundled_models_answer():
    model, tokenizer = skipstone.load()
    out = skipstone.generate(model, "> wake me up at 7 am tomorrow\n", tokenizer=tokenizer, max_new_tokens=TOKENS)
    page = QUICK_START.read_text()
    assert f"    {out.text.strip()}\n" in page
    assert out.stats is not None
    assert f"{out.stats.steps} steps: M {out.stats.mean_acceptance_length:.2f} tokens a step" in page


def test_stream_snippet_names_every_origin_that_occurs(executed):
    _, printed = executed
    (remark,) = (line for block in blocks(QUICK_START, "python") for line in block.code.splitlines() if "# origin:" in line)
    for origin in ("prefill", "draft", "recovered", "bonus"):
        assert f'"{origin}"' in remark
    seen = {word for word in ("prefill", "draft", "recovered", "bonus") if f"'{word}'" in printed}
    assert {"prefill", "draft", "recovered"} <= seen


COMMANDS = [pytest.param(words, marks=[pytest.mark.slow] * (words[0] in LONG)) for words in skipstone_commands()]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words[:2]))
def test_command_line_runs(words, checkpoint, monkeypatch, capsys, tmp_path):
    """In this process, through the console script's entry point. `check` makes two probes: in tests/cli it makes all."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Checker, "_probes", lambda self, real=Checker._probes: real(self)[:2])
    Path("prompts.jsonl").write_text('{"prompt": "def f("}\n{"prompt": "import"}\n')
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
    if words == ["--version"]:
        assert skipstone.__version__ in printed.out
    if words == ["methods"]:
        assert all(name in printed.out for name in skipstone.METHODS)


def test_every_other_command_installs_or_is_a_target_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    others = [words for words in commands() if Path(words[0]).name != "skipstone" and words != ["pip", "install", "."]]
    assert others == [["make", "demo"]]
    assert all(f"\n{target}: " in makefile for _, target, *_ in others)


def test_methods_table_says_which_methods_are_lossy():
    """A method may be young and not in the table yet: `skipstone methods` lists all."""
    rows = {row[0].partition("]")[0].strip("[`"): row[-1] for row in table_rows(QUICK_START)}
    listed = skipstone.METHODS.keys() & rows.keys()
    assert len(listed) > 5
    for name in listed:
        assert ("lossless = False" in rows[name]) == (not skipstone.METHODS[name]().lossless)


def test_the_table_of_models_is_what_the_command_prints():
    printed = CliRunner().invoke(app, ["families", "--markdown"])
    assert printed.exit_code == 0
    written = (ROOT / "docs" / "models.md").read_text().split("<!-- families -->")[1]
    assert printed.output.strip() == written.strip()
    tested = [line for line in printed.output.splitlines() if line.startswith("| tested |")]
    assert sum(line.count(",") - line.split("|")[2].count(",") + 1 for line in tested) >= 85


def test_files_that_the_package_metadata_names_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (ROOT / project["readme"]).read_text().startswith(f"# {project['name']}\n")
    assert f"## [{project['version']}]" in (ROOT / "CHANGELOG.md").read_text()
    assert project["version"] == skipstone.__version__
