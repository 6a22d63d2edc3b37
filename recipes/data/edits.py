"""Prompts for lookups: requests for a small change of a program, so that answers copy most of it.

    python recipes/data/edits.py runs/edits.jsonl --data-dir FOLDER

FOLDER holds mbpp.jsonl. Its programs with 8 to 24 lines are taken, in their order.
"""

import argparse
import json
from pathlib import Path
from typing import Any

LINES = range(8, 25)
"""Allowed numbers of lines of a program."""
REQUEST = "Add a docstring to the first function of this program. Write the whole program again.\n\n```python\n{code}\n```"


def edits(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests for MBPP's records, each a chat of one turn."""
    programs = ["\n".join(record["code"].expandtabs(4).splitlines()).strip("\n") for record in records]
    return [{"turns": [REQUEST.format(code=one)]} for one in programs if len(one.splitlines()) in LINES]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    args = parser.parse_args()
    lines = (args.data_dir / "mbpp.jsonl").read_text(encoding="utf-8").splitlines()
    requests = edits([json.loads(line) for line in lines])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text("".join(json.dumps(one) + "\n" for one in requests), encoding="utf-8")
    print(f"{args.out}: {len(requests)} requests")
