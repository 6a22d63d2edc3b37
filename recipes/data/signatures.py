"""MBPP's tasks in HumanEval's form: the signature of a function, its description and an example.

    python recipes/data/signatures.py runs/signatures.jsonl --data-dir FOLDER

FOLDER holds mbpp.jsonl. The written file has one `prompt` per line, to train exit heads on: see
recipes/train/nano-heads-signatures.yaml.
"""

import argparse
import ast
import json
from pathlib import Path
from typing import Any

FILE = "mbpp.jsonl"


def signature(record: dict[str, Any]) -> str | None:
    """The beginning of a task's function; None if its code does not define the function of its first test, or if the test
    compares nothing."""
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
    args = parser.parse_args()
    lines = (args.data_dir / FILE).read_text(encoding="utf-8").splitlines()
    signatures = [one for one in map(signature, map(json.loads, lines)) if one is not None]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps({"prompt": one}) + "\n" for one in signatures), encoding="utf-8")
    print(f"{args.out}: {len(signatures)} of {len(lines)} tasks")
