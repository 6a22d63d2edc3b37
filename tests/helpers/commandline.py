"""What the tests of the command line share: a prompt, a method, and runs of the program in this process."""

import functools
import io
import json
import re
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from typer.main import get_command

import skipstone
from skipstone.cli import app
from skipstone.cli.runs import RunInput

PROMPT = "def add(a, b):\n    return a"
LAYERSKIP = ("--method", "layerskip exit_layer=2 num_speculative_tokens=4")


@functools.cache
def program() -> Any:
    return get_command(app)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(*arguments: Any, stdin: bytes | str | None = None) -> Result:
    """The program in this process. It quietens libraries before they are imported, which is too late here."""
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return CliRunner().invoke(program(), [*map(str, arguments)], input=stdin)
    finally:
        logging.set_verbosity(verbosity)


def succeed(*arguments: Any, stdin: str | None = None) -> Result:
    result = run(*arguments, stdin=stdin)
    assert result.exit_code == 0, result.stderr
    return result


def document(*arguments: Any) -> dict[str, Any]:
    return json.loads(succeed(*arguments, "--json").stdout)


def expected(folder: Path, prompt: str = PROMPT, tokens: int = 24, **options: Any) -> tuple[list[int], str]:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    output = model.generate(ids, do_sample=False, max_new_tokens=tokens, tokenizer=tokenizer, **options)
    new = output[0, ids.shape[1] :].tolist()
    return new, tokenizer.decode(new, skip_special_tokens=True)


def job(folder: Path, **options: Any) -> RunInput:
    model, tokenizer = skipstone.load(folder)
    ids = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    return RunInput(model, tokenizer, ids, {"max_new_tokens": 24, "do_sample": False} | options, 0)


def assert_refused(result: Result, part: str) -> None:
    """Exit code 2, one line on stderr with this part in it, nothing on stdout."""
    assert result.exit_code == 2, (result.exit_code, result.stdout, result.stderr)
    assert result.stdout == ""
    assert re.fullmatch(r"skipstone: [^\n]+\n", result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert part in result.stderr, result.stderr
