"""Tasks in the schema of the real data sets, over records of our own writing in tests/helpers/records."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skipstone.lab.tasks import data_sets as tasks
from skipstone.lab.tasks import protocols
from skipstone.lab.tasks.data_sets import TASKS, Task, prompt_of

FOLDER = Path(__file__).parents[2] / "helpers" / "records"
ANSWERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "humaneval": lambda row: row["canonical_solution"],
    "mbpp": lambda row: row["code"] + "\n[DONE]",
    "gsm8k": lambda row: " " + row["answer"],
    "cnn_dm": lambda row: " " + row["highlights"],
    "xsum": lambda row: " " + row["summary"],
    "mmlu": lambda row: " ABCD"[row["answer"] + 1] + ".",
    "topv2": lambda row: row["semantic_parse"] + "\nmore",
}
"""An output of full marks."""


def test_every_task_reads_its_records_and_asks() -> None:
    for name, task in TASKS.items():
        rows = task.records(FOLDER)
        assert len(rows) == 3, name
        turns = [task.ask(row) for row in rows]
        assert all(turn for one in turns for turn in one)
        assert len({one[0] for one in turns}) == 3
        assert task.licence


def test_the_prompts_are_those_of_the_papers() -> None:
    def asked(name: str) -> list[str]:
        return TASKS[name].ask(TASKS[name].records(FOLDER)[0])

    assert asked("humaneval") == ['def add(a, b):\n    """The sum of a and b."""\n']
    assert asked("gsm8k") == ["Question: Ann has 3 apples and buys 4. How many has she?\nAnswer:"]
    assert asked("mmlu") == ["Which of these numbers is prime?\nA. 21\nB. 27\nC. 29\nD. 33\nAnswer:"]
    assert asked("cnn_dm")[0].startswith("Article: A ferry")
    assert asked("cnn_dm")[0].endswith("Nobody was hurt.\nSummary:")
    assert asked("tinystories") == [" ".join(f"word{i}" for i in range(32))]
    assert asked("spec-bench") == ["Write one line about rain.", "Now as a question."]
    assert asked("topv2") == ["set an alarm for 6 am\n"]
    assert asked("mbpp")[0].endswith("pass these tests:\n\nassert double(2) == 4\nassert double(0) == 0\n[BEGIN]\n")
    assert [row["task_id"] for row in TASKS["mbpp"].records(FOLDER)] == [11, 12, 510], "the test part alone"
    assert [row["task_id"] for row in TASKS["mbpp"].examples(3, FOLDER)] == [2]
    polite = TASKS["alpaca"].records(FOLDER)[1]
    assert TASKS["alpaca"].ask(polite) == ["Make this polite.\n\nGive me the salt."]


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.examples_source and name != "mbpp"])
def test_solved_examples_stand_before_the_question(name: str) -> None:
    task = TASKS[name]
    row, shown = task.records(FOLDER)[0], task.examples(2, FOLDER)
    assert task.answer is not None
    (prompt,) = prompt_of(task, row, shown)
    first, second, question = prompt.split("\n\n")
    assert question == task.ask(row)[0]
    assert first == task.ask(shown[0])[0] + task.answer(shown[0])
    assert second == task.ask(shown[1])[0] + task.answer(shown[1])
    assert prompt_of(task, row, []) == task.ask(row)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_right_answer_has_full_marks_and_another_has_not(name: str) -> None:
    task = TASKS[name]
    assert task.score is not None
    for row in task.records(FOLDER):
        full, none = task.score.grade(row, ANSWERS[name](row)), task.score.grade(row, "    pass\n")
        assert set(full.values()) == {1.0}
        assert max(none.values()) < 0.2


def test_records_come_from_the_hub_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(path: str, **options: Any) -> list[dict[str, Any]]:
        asked.append((path, options))
        return [{"question": "1 + 1?", "answer": "#### 2"}] * 5

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    assert len(TASKS["gsm8k"].records(None)) >= 2
    assert len(TASKS["gsm8k"].examples(3, None)) == 3
    wanted = {"name": "main", "revision": None}
    expected = [{**wanted, "split": "test", "streaming": False}, {**wanted, "split": "train", "streaming": True}]
    assert asked == [("openai/gsm8k", options) for options in expected]


def test_what_cannot_be_had_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"holds no gsm8k_test.jsonl.*load_dataset\(\"openai/gsm8k\", \"main\", split=\"test\"\)"
    ):
        TASKS["gsm8k"].records(tmp_path)
    for folder in (None, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"question\.jsonl of the repository hemingkx/Spec-Bench"):
            TASKS["spec-bench"].records(folder)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'task xsum: .* pip install "skipstone\[bench\]"'):
        TASKS["xsum"].records(None)


def test_records_of_another_schema_are_refused_by_line(tmp_path: Path) -> None:
    (tmp_path / "gsm8k_test.jsonl").write_text('{"question": "?", "answer": "#### 1"}\n{"question": "?"}\n')
    with pytest.raises(ValueError, match=r"gsm8k_test.jsonl, line 2: task gsm8k needs question, answer; 'answer' is missing"):
        TASKS["gsm8k"].records(tmp_path)
    (tmp_path / "humaneval.jsonl").write_text("")
    with pytest.raises(ValueError, match="no records"):
        TASKS["humaneval"].records(tmp_path)
    with pytest.raises(ValueError, match="humaneval has no examples to show"):
        TASKS["humaneval"].examples(1, FOLDER)


def test_any_file_of_prompts_is_a_task(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    records = [{"prompt": "a"}, {"text": "b", "reference": "c"}, {"turns": ["d", "e"]}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    task: Task = tasks.named(str(path))
    rows = task.records(Path("/"))
    assert [task.ask(row) for row in rows] == [["a"], ["b"], ["d", "e"]]
    assert task.score is not None
    assert [task.score.grade(row, " c\n") for row in rows] == [{}, {"exact_match": 1.0}, {}]
    for record, said in {
        '{"question": "?"}': "line 1: expected a text under prompt or text, or a list of texts under turns, found question",
        '{"prompt": "a", "category": 1}': "line 1: category must be a text, found 1",
        '{"prompt": "a", "reference": 42}': "line 1: reference must be a text, found 42",
        '{"prompt": "a", "reference": "b", "choices": ["c"]}': r"line 1: choices .* the reference among them, found \['c'\]",
        '{"prompt": "a", "reference": " ", "choices": [" "]}': "line 1: choices must be a list of texts",
        '{"turns": ["a", 2]}': r"line 1: turns must be a list of texts, found \['a', 2\]",
        "[1]": r"line 1: expected an object, found \[1\]",
    }.items():
        path.write_text(record + "\n")
        with pytest.raises(ValueError, match=said):
            task.records(Path("/"))
    with pytest.raises(FileNotFoundError, match="no such file of prompts"):
        tasks.named(str(tmp_path / "other.jsonl"))
    path.write_text('{"prompt": "a", "reference": "b", "choices": ["c", "b"]}\n')
    assert [task.choices(row) for row in task.records(Path("/"))] == [["c", "b"]]
    mmlu = tasks.named("mmlu")
    assert mmlu is TASKS["mmlu"]
    assert mmlu.answer is not None
    for row in mmlu.records(FOLDER):
        assert (mmlu.answer(row), len(mmlu.choices(row) or ())) == (f" {'ABCD'[row['answer']]}", len(row["choices"]))
        assert mmlu.answer(row) in (mmlu.choices(row) or ())


def test_protocols_are_about_tasks_that_exist_and_can_show_what_they_ask_for() -> None:
    for name, presets in protocols.PROTOCOLS.items():
        for task, asked in presets.items():
            assert task in TASKS, name
            assert asked is protocols.settings(name, task)
            assert not asked.shots or TASKS[task].examples_source
    swift = protocols.settings("swift", "gsm8k")
    assert (swift.shots, swift.max_new_tokens, swift.num_prompts, swift.temperature) == (5, 64, 1000, 0.0)
    with pytest.raises(ValueError, match="unknown protocol 'medusa'; there are layerskip, swift"):
        protocols.settings("medusa", "gsm8k")
