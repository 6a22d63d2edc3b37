"""The program as a process: interruption, pipes, start-up."""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import skipstone
from tests.helpers.commandline import LAYERSKIP, PROMPT, expected, run


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ctrl-C before the fifth step. A shell that runs the tests in the background has them ignore it."""
    real, before = skipstone.stream, signal.signal(signal.SIGINT, signal.default_int_handler)

    def impatient(*arguments: Any, **options: Any) -> Any:
        for number, step in enumerate(real(*arguments, **options)):
            if number == 4:
                signal.raise_signal(signal.SIGINT)
            yield step

    monkeypatch.setattr(skipstone, "stream", impatient)
    yield
    signal.signal(signal.SIGINT, before)


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


def _start(*arguments: Any) -> subprocess.Popen[bytes]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "skipstone", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=environment)


@pytest.mark.slow
def test_text_goes_through_pipes_untouched(folder: Path) -> None:
    process = _start("generate", folder, *LAYERSKIP, "--max-new-tokens", 24, "--stats")
    out, err = process.communicate(PROMPT.encode(), timeout=120)
    assert (process.returncode, out.decode()) == (0, expected(folder)[1])
    assert b"tokens/s" in err


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error_message(folder: Path) -> None:
    process = _start("generate", folder, *LAYERSKIP, "--prompt", PROMPT, "--max-new-tokens", 100_000, "--ignore-eos")
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
