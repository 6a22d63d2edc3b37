"""The data sets that methods are measured on: where each lies, what its records hold, how it asks and how it is scored.

Records come from the hub or, with a data folder, from files of JSON lines in the hub's own schema. None of it is part of this
package but SELF.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from skipstone.assets import PROMPTS
from skipstone.records import OnHub
from skipstone.tasks import scores
from skipstone.tasks.task import Row, Score, Task

BEGINNING = 32
"""Words of a story that are given; the rest is to be told."""


def _filled(template: str) -> Callable[[Row], list[str]]:
    return lambda row: [template.format(**row)]


def _field(name: str, before: str = " ") -> Callable[[Row], str]:
    return lambda row: f"{before}{row[name]}"


def _mmlu(row: Row) -> list[str]:
    """Hendrycks et al. (arXiv 2009.03300): the question, lettered choices, "Answer:"."""
    choices = "".join(f"{letter}. {text}\n" for letter, text in zip("ABCD", row["choices"], strict=True))
    return [f"{row['question']}\n{choices}Answer:"]


def _mbpp(row: Row) -> list[str]:
    """Austin et al. (arXiv 2108.07732), section 3."""
    tests = "\n".join(row["test_list"])
    return [
        f"You are an expert Python programmer, and here is your task: {row['text']} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    ]


def _alpaca(row: Row) -> list[str]:
    return [f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]]


def _story(row: Row) -> list[str]:
    return [" ".join(row["text"].split()[:BEGINNING])]


def _rest_of_story(row: Row) -> str:
    return " " + " ".join(row["text"].split()[BEGINNING:])


def _one(name: str, good: Callable[[Row, str], bool], executes: bool = False) -> Score:
    return Score((name,), lambda row, output: {name: float(good(row, output))}, executes)


def rouge(field: str) -> Score:
    """ROUGE against a field of the record."""
    return Score(("rouge_2", "rouge_l"), lambda row, output: scores.rouge(output, row[field]), ready=scores.rouge_scorer)


PASS = "pass"
_TRAIN = "train"
_CODE = _one(PASS, lambda row, out: scores.passes(scores.human_eval_program(row, out)).passed, executes=True)
_MBPP = _one(PASS, lambda row, out: scores.passes(scores.mbpp_program(row, out)).passed, executes=True)
_SUM = _one("exact_match", lambda row, out: scores.same_number(out, row["answer"]))
_CHOICE = _one("accuracy", lambda row, out: scores.choice(out) == "ABCD"[row["answer"]])
_PARSE = _one("exact_match", lambda row, out: scores.exact(out.partition("\n")[0], row["semantic_parse"]))


def _as_referenced(row: Row, output: str) -> dict[str, float]:
    return {} if row.get("reference") is None else {"exact_match": float(scores.exact(output, row["reference"]))}


def _cnn_dm(split: str) -> OnHub:
    return OnHub("abisee/cnn_dailymail", split, "3.0.0", extra="bench")


def _gsm8k(split: str) -> OnHub:
    return OnHub("openai/gsm8k", split, "main", extra="bench")


TASKS = {
    task.name: task
    for task in (
        Task(
            "humaneval",
            OnHub("openai/openai_humaneval", "test", extra="bench"),
            "humaneval.jsonl",
            ("task_id", "prompt", "entry_point", "test"),
            "MIT",
            _filled("{prompt}"),
            _CODE,
            answer=lambda row: row.get("canonical_solution"),
            rouge="canonical_solution",
        ),
        Task(
            "mbpp",
            OnHub("google-research-datasets/mbpp", "test", "full", extra="bench"),
            "mbpp.jsonl",
            ("task_id", "text", "code", "test_list"),
            "CC-BY 4.0",
            _mbpp,
            _MBPP,
            answer=lambda row: f"{row['code']}\n[DONE]",
            shown=(OnHub("google-research-datasets/mbpp", "prompt", "full", extra="bench"), "mbpp_prompt.jsonl"),
            keep=lambda row: 11 <= row.get("task_id", 11) <= 510,  # the test part, should the file hold all of it
        ),
        Task(
            "gsm8k",
            _gsm8k("test"),
            "gsm8k_test.jsonl",
            ("question", "answer"),
            "MIT",
            _filled("Question: {question}\nAnswer:"),
            _SUM,
            answer=_field("answer"),
            shown=(_gsm8k(_TRAIN), "gsm8k_train.jsonl"),
        ),
        Task(
            "spec-bench",
            None,
            "spec_bench.jsonl",
            ("question_id", "category", "turns"),
            "Apache-2.0",
            lambda row: list(row["turns"]),
            category=lambda row: str(row["category"]),
            obtain="Save data/spec_bench/question.jsonl of the repository hemingkx/Spec-Bench as spec_bench.jsonl in a folder, "
            "and give that folder with --data-dir",
        ),
        Task(
            "cnn_dm",
            _cnn_dm("test"),
            "cnn_dm_test.jsonl",
            ("article", "highlights"),
            "Apache-2.0",
            _filled("Article: {article}\nSummary:"),
            rouge("highlights"),
            answer=_field("highlights"),
            shown=(_cnn_dm(_TRAIN), "cnn_dm_train.jsonl"),
        ),
        Task(
            "xsum",
            OnHub("EdinburghNLP/xsum", "test", extra="bench"),
            "xsum_test.jsonl",
            ("document", "summary"),
            "not stated on the hub",
            _filled("Article: {document}\nSummary:"),
            rouge("summary"),
            answer=_field("summary"),
            shown=(OnHub("EdinburghNLP/xsum", _TRAIN, extra="bench"), "xsum_train.jsonl"),
        ),
        Task(
            "mmlu",
            OnHub("cais/mmlu", "validation", "all", extra="bench"),
            "mmlu_validation.jsonl",
            ("question", "choices", "answer"),
            "MIT",
            _mmlu,
            _CHOICE,
            answer=lambda row: f" {'ABCD'[row['answer']]}",
            shown=(OnHub("cais/mmlu", "dev", "all", extra="bench"), "mmlu_dev.jsonl"),
        ),
        Task(
            "tinystories",
            OnHub("roneneldan/TinyStories", "validation", extra="bench"),
            "tinystories_validation.jsonl",
            ("text",),
            "CDLA-Sharing-1.0",
            _story,
            answer=_rest_of_story,
            shown=(OnHub("roneneldan/TinyStories", _TRAIN, extra="bench"), "tinystories_train.jsonl"),
        ),
        Task(
            "alpaca",
            OnHub("tatsu-lab/alpaca", _TRAIN, extra="bench"),
            "alpaca_train.jsonl",
            ("instruction", "input"),
            "CC-BY-NC 4.0",
            _alpaca,
            answer=lambda row: "\n\n" + row["output"] if row.get("output") else None,
        ),
        Task(
            "topv2",
            OnHub("WillHeld/top_v2", "test", extra="bench"),
            "topv2_test.jsonl",
            ("utterance", "semantic_parse"),
            "CC-BY-SA 4.0",
            _filled("{utterance}\n"),
            _PARSE,
            answer=_field("semantic_parse", ""),
            shown=(OnHub("WillHeld/top_v2", _TRAIN, extra="bench"), "topv2_train.jsonl"),
        ),
    )
}


SELF = "self"


def named(name: str) -> Task:
    """A task of the table, "self" for the few prompts that come with this package, or any file of JSON lines with prompts: the
    keys prompt (or text, or turns) and, to be scored by exact match, reference. ValueError for an unknown name."""
    if name in TASKS:
        return TASKS[name]
    if name == SELF:
        return Task(SELF, None, str(PROMPTS), ("prompt",), "Apache-2.0", _own)
    path = Path(name).expanduser()
    if path.suffix != ".jsonl":
        raise ValueError(f"unknown task {name!r}; there are {', '.join((SELF, *TASKS))}, or any .jsonl file of prompts")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of prompts")
    return Task(
        path.stem,
        None,
        str(path.absolute()),
        (),
        "yours",
        _own,
        Score(("exact_match",), _as_referenced),
        answer=lambda row: row.get("reference"),
        fault=_own_fault,
        category=lambda row: row.get("category"),
    )


def _own(row: Row) -> list[str]:
    if row.get("turns"):
        return list(row["turns"])
    return [row["prompt"] if row.get("prompt") else row["text"]]


def _own_fault(row: Row) -> str | None:
    turns = row.get("turns")
    if turns and not (isinstance(turns, list) and all(isinstance(turn, str) and turn for turn in turns)):
        return f"turns must be a list of texts, found {turns!r:.60}"
    for key in ("prompt", "text", "reference", "category"):
        if row.get(key) is not None and not isinstance(row[key], str):
            return f"{key} must be a text, found {row[key]!r:.60}"
    if not (turns or row.get("prompt") or row.get("text")):
        return f"expected a text under prompt or text, or a list of texts under turns, found {', '.join(row) or 'nothing'}"
    return None
