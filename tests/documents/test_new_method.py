"""A new method touches three places: its file, a line in the registry, a row of the conformance suite."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.snippets import ROOT, blocks

PAGE = ROOT / "docs" / "add-a-method.md"
METHOD = "src/skipstone/methods/bigram.py"
REGISTRY = "src/skipstone/methods/__init__.py"
ROWS = "tests/helpers/conformance.py"
DRIVER = '''
"""The command line knows the method by its name."""
from tests.helpers.commandline import PROMPT, document, succeed

def test_the_command_line_knows_bigram(folder):
    assert "bigram" in succeed("methods").stdout
    assert "num_speculative_tokens" in succeed("methods", "bigram").stdout
    asked = ("generate", folder, "--prompt", PROMPT, "--max-new-tokens", 24, "--method")
    fast, plain = document(*asked, "bigram num_speculative_tokens=3"), document(*asked, "autoregressive")
    assert fast["tokens"] == plain["tokens"]
    assert fast["method"] == {**fast["method"], "method": "bigram", "num_speculative_tokens": 3}
'''


def marked(mark: str) -> str:
    """The block of the page that stands under a mark."""
    (code,) = (block.code for block in blocks(PAGE, "python") if block.mark == mark)
    return code


def insert(path: Path, after: str, line: str) -> None:
    """Put a line behind the one that begins so."""
    text = path.read_text()
    start = text.index(after)
    end = text.index("\n", start) + 1
    path.write_text(text[:end] + line + "\n" + text[end:])


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A copy of the repository with the method in its three places."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("assets", "*.egg-info"))
    (tmp_path / "src/skipstone/assets").symlink_to(ROOT / "src/skipstone/assets")
    shutil.copytree(ROOT / "tests", tmp_path / "tests")
    for path in ROOT.iterdir():
        if path.name in ("docs", "recipes", "pyproject.toml", "Makefile") or path.suffix == ".md":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / METHOD).write_text(marked("<!-- file -->"))
    imported = "from skipstone.methods.bigram import BigramLookup"
    insert(tmp_path / REGISTRY, "from skipstone.methods.autoregressive", imported)
    insert(tmp_path / REGISTRY, "METHODS: dict", marked("<!-- registry -->"))
    insert(
        tmp_path / ROWS,
        "from skipstone.methods.bigram" if "bigram" in (ROOT / ROWS).read_text() else "from tests.helpers import",
        imported,
    )
    insert(tmp_path / ROWS, "ROWS: dict", marked("<!-- test row -->"))
    return tmp_path


@pytest.mark.slow
def test_nothing_else_needs_to_be_touched(house: Path) -> None:
    (house / "tests/cli/test_driver.py").write_text(DRIVER)
    cells = "bigram and (mistral or llama) and of_the_reference and not all_settings"
    rest = "every_method or labels or test_house or methods_table or methods_lists or command_line_knows"
    files = ["methods/test_methods.py", "documents/test_house.py", "documents/test_readme.py", "cli/test_cli_methods.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += ["-k", f"({cells}) or {rest}", *(f"tests/{file}" for file in files), "tests/cli/test_driver.py"]
    environment = {**os.environ, "PYTHONPATH": str(house / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=house, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    passed = re.findall(r"^PASSED (.+)", done.stdout, re.MULTILINE)
    for part in (
        "of_the_reference[mistral-bigram",
        "of_the_reference[llama-bigram",
        "command_line_knows",
        "every_file_documents_itself",
    ):
        assert any(part in name for name in passed), f"no test {part} ran"
