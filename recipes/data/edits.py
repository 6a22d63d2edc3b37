"""Requests to change a program a little, whose answers copy most of it: prompts to measure lookups on.

    python recipes/data/edits.py runs/edits.jsonl --data-dir FOLDER

FOLDER holds mbpp.jsonl, whose programs of 8 to 24 lines are asked for, in their order.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

LINES = range(8, 25)
"""Lines of a program that is asked for."""
REQUEST = "Add a docstring to the first function of this program. Write the whole program again.\n\n```python\n{code}\n```"


def edits(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The requests, one turn of a chat each."""
    programs = ["\n".join(record["code"].expandtabs(4).splitlines()).strip("\n") for record in records]
    return [{"turns": [REQUEST.format(code=one)]} for one in programs if len(one.splitlines()) in LINES]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    asked = parser.parse_args()
    lines = (asked.data_dir / "mbpp.jsonl").read_text(encoding="utf-8").splitlines()
    found = edits([json.loads(line) for line in lines])
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    asked.out.write_text("".join(json.dumps(one) + "\n" for one in found), encoding="utf-8")
    print(f"{asked.out}: {len(found)} requests")
