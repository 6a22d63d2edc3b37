"""Questions with choices: one record a question, as `skipstone bench run` reads it."""

import json
from pathlib import Path
from typing import Any

from recipes.exam_questions import records_of
from skipstone.lab.tasks.data_sets import named


def request(question: int, context: str, continuation: str, label: Any) -> dict[str, Any]:
    return {"doc_id": question, "label": label, "request": {"context": context, "continuation": continuation}}


def test_requests_of_a_question_become_one_record_of_a_task(tmp_path: Path) -> None:
    requests = [request(0, "Q: sky?\nA:", choice, 1) for choice in (" red", " blue")]
    requests += [request(1_000_000, "A:", " red", 1), request(7, "Birds can", " fly", ["fly"])]
    records = records_of(requests)
    assert records == [
        {"prompt": "Q: sky?\nA:", "reference": " blue", "choices": [" red", " blue"]},
        {"prompt": "Birds can", "reference": " fly"},
    ]
    file = tmp_path / "questions.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert named(str(file)).records(None) == records
