"""MBPP's tasks as beginnings of functions, the way HumanEval asks: a signature, what it does, an example.

    python recipes/data/signatures.py runs/signatures.jsonl --data-dir FOLDER

FOLDER holds mbpp.jsonl. The file that is written has a `prompt` a line, for exit heads that learn to continue such beginnings
(recipes/smollm2/heads-code.yaml).
"""

from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path
from typing import Any

FILE = "mbpp.jsonl"


def signature(record: dict[str, Any]) -> str | None:
    """The beginning of the function that a task asks for; None where its code does not define what its first test calls, or
    its test compares nothing."""
    try:
        code = ast.parse(record["code"].replace("\r\n", "\n"))
        (test,) = ast.parse(record["test_list"][0]).body
    except (SyntaxError, ValueError):
        return None
    if not (isinstance(test, ast.Assert) and isinstance(test.test, ast.Compare) and isinstance(test.test.left, ast.Call)):
        return None
    call, value = test.test.left, test.test.comparators[0]
    name = ast.unparse(call.func)
    arguments = next(
        (ast.unparse(one.args) for one in code.body if isinstance(one, ast.FunctionDef) and one.name == name), None
    )
    if arguments is None:
        return None
    return (
        f'def {name}({arguments}):\n    """ {record["text"]}\n    >>> {ast.unparse(call)}\n    {ast.unparse(value)}\n    """\n'
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    asked = parser.parse_args()
    lines = (asked.data_dir / FILE).read_text(encoding="utf-8").splitlines()
    found = [one for one in map(signature, map(json.loads, lines)) if one is not None]
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in found), encoding="utf-8")
    print(f"{asked.out}: {len(found)} of {len(lines)} tasks")
