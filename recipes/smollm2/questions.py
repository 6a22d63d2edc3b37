"""The questions of Spec-Bench that heads-instructions.yaml does not train on, as a task of `skipstone bench run`.

    python recipes/smollm2/questions.py runs/smollm2/questions.jsonl --data-dir FOLDER

FOLDER holds spec_bench.jsonl. The categories alternate, so that the first questions are of all kinds.
"""

import argparse
import json
from collections import defaultdict
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import yaml

RECIPE = Path(__file__).with_name("heads-instructions.yaml")


def left_out(records: list[dict[str, Any]], seen: list[list[int]]) -> list[dict[str, Any]]:
    """The records with a question_id in none of the ranges [first, last] in `seen`; the categories alternate."""
    by_category = defaultdict(list)
    for record in records:
        if not any(first <= record["question_id"] <= last for first, last in seen):
            by_category[record["category"]].append({"turns": record["turns"], "category": record["category"]})
    return [one for one in chain(*zip_longest(*by_category.values())) if one is not None]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--data-dir", type=Path, required=True)
    args = parser.parse_args()
    (source,) = yaml.safe_load(RECIPE.read_text(encoding="utf-8"))["prompts"]
    lines = (args.data_dir / source["file"]).read_text(encoding="utf-8").splitlines()
    questions = left_out([json.loads(line) for line in lines], source["where"]["question_id"])
    args.out.write_text("".join(json.dumps(one) + "\n" for one in questions), encoding="utf-8")
    print(f"{args.out}: {len(questions)} of {len(lines)} questions")
