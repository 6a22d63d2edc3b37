"""The data sets that methods are measured on: their source, schema, prompts and scores.

Records come from the hub or, with a data folder, from files of JSON lines in the hub's schema. Only SELF is part of this
package.
"""

from collections.abc import Callable
from pathlib import Path

from skipstone.assets import PROMPTS
from skipstone.lab.tasks import scores
from skipstone.lab.tasks.sandbox import run
from skipstone.lab.tasks.task import DatasetLocation, Record, ScoreRule, Task
from skipstone.utils.records import HubRecords
from skipstone.utils.spelling import did_you_mean

SELF = "self"  # the prompts of this package
BEGINNING = 32  # words of a story in the prompt


def _filled(template: str) -> Callable[[Record], list[str]]:
    return lambda record: [template.format(**record)]


def _field(name: str, before: str = " ") -> Callable[[Record], str]:
    return lambda record: f"{before}{record[name]}"


def _mmlu(record: Record) -> list[str]:
    """Hendrycks et al. (arXiv 2009.03300): the question, lettered choices, "Answer:"."""
    choices = "".join(f"{letter}. {text}\n" for letter, text in zip("ABCD", record["choices"], strict=True))
    return [f"{record['question']}\n{choices}Answer:"]


def _mbpp(record: Record) -> list[str]:
    """Austin et al. (arXiv 2108.07732), section 3."""
    tests = "\n".join(record["test_list"])
    return [
        f"You are an expert Python programmer, and here is your task: {record['text']} "
        f"Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"
    ]


def _alpaca(record: Record) -> list[str]:
    return [f"{record['instruction']}\n\n{record['input']}" if record.get("input") else record["instruction"]]


def _story(record: Record) -> list[str]:
    return [" ".join(record["text"].split()[:BEGINNING])]


def _rest_of_story(record: Record) -> str:
    return " " + " ".join(record["text"].split()[BEGINNING:])


def _one(name: str, good: Callable[[Record, str], bool], executes: bool = False) -> ScoreRule:
    """A score of 1 or 0."""
    return ScoreRule(lambda record, output: {name: float(good(record, output))}, executes)


def rouge(field: str) -> ScoreRule:
    """ROUGE against a field of the record."""
    return ScoreRule(lambda record, output: scores.rouge(output, record[field]), ready=scores.rouge_scorer)


def _as_referenced(record: Record, output: str) -> dict[str, float]:
    return {} if record.get("reference") is None else {"exact_match": float(scores.exact(output, record["reference"]))}


def _source(file: str, path: str, split: str, config: str | None = None) -> DatasetLocation:
    return DatasetLocation(HubRecords(path, split, config, extra="bench"), file)


TASKS = {
    task.name: task
    for task in (
        Task(
            "humaneval",
            _source("humaneval.jsonl", "openai/openai_humaneval", "test"),
            ("task_id", "prompt", "entry_point", "test"),
            "MIT",
            _filled("{prompt}"),
            _one("pass", lambda record, out: run(scores.human_eval_program(record, out)).passed, executes=True),
            answer=lambda record: record.get("canonical_solution"),
            rouge="canonical_solution",
        ),
        Task(
            "mbpp",
            _source("mbpp.jsonl", "google-research-datasets/mbpp", "test", "full"),
            ("task_id", "text", "code", "test_list"),
            "CC-BY 4.0",
            _mbpp,
            _one("pass", lambda record, out: run(scores.mbpp_program(record, out)).passed, executes=True),
            answer=lambda record: f"{record['code']}\n[DONE]",
            examples_source=_source("mbpp_prompt.jsonl", "google-research-datasets/mbpp", "prompt", "full"),
            keep=lambda record: 11 <= record.get("task_id", 11) <= 510,  # the test part, should the file hold all of it
        ),
        Task(
            "gsm8k",
            _source("gsm8k_test.jsonl", "openai/gsm8k", "test", "main"),
            ("question", "answer"),
            "MIT",
            _filled("Question: {question}\nAnswer:"),
            _one("exact_match", lambda record, out: scores.same_number(out, record["answer"])),
            answer=_field("answer"),
            examples_source=_source("gsm8k_train.jsonl", "openai/gsm8k", "train", "main"),
        ),
        Task(
            "spec-bench",
            DatasetLocation(None, "spec_bench.jsonl"),
            ("question_id", "category", "turns"),
            "Apache-2.0",
            lambda record: list(record["turns"]),
            category=lambda record: str(record["category"]),
            obtain="Save data/spec_bench/question.jsonl of the repository hemingkx/Spec-Bench as spec_bench.jsonl in a folder, "
            "and give that folder with --data-dir",
        ),
        Task(
            "cnn_dm",
            _source("cnn_dm_test.jsonl", "abisee/cnn_dailymail", "test", "3.0.0"),
            ("article", "highlights"),
            "Apache-2.0",
            _filled("Article: {article}\nSummary:"),
            rouge("highlights"),
            answer=_field("highlights"),
            examples_source=_source("cnn_dm_train.jsonl", "abisee/cnn_dailymail", "train", "3.0.0"),
        ),
        Task(
            "xsum",
            _source("xsum_test.jsonl", "EdinburghNLP/xsum", "test"),
            ("document", "summary"),
            "not stated on the hub",
            _filled("Article: {document}\nSummary:"),
            rouge("summary"),
            answer=_field("summary"),
            examples_source=_source("xsum_train.jsonl", "EdinburghNLP/xsum", "train"),
        ),
        Task(
            "mmlu",
            _source("mmlu_validation.jsonl", "cais/mmlu", "validation", "all"),
            ("question", "choices", "answer"),
            "MIT",
            _mmlu,
            _one("accuracy", lambda record, out: scores.choice(out) == "ABCD"[record["answer"]]),
            answer=lambda record: f" {'ABCD'[record['answer']]}",
            examples_source=_source("mmlu_dev.jsonl", "cais/mmlu", "dev", "all"),
        ),
        Task(
            "tinystories",
            _source("tinystories_validation.jsonl", "roneneldan/TinyStories", "validation"),
            ("text",),
            "CDLA-Sharing-1.0",
            _story,
            answer=_rest_of_story,
            examples_source=_source("tinystories_train.jsonl", "roneneldan/TinyStories", "train"),
        ),
        Task(
            "alpaca",
            _source("alpaca_train.jsonl", "tatsu-lab/alpaca", "train"),
            ("instruction", "input"),
            "CC-BY-NC 4.0",
            _alpaca,
            answer=lambda record: "\n\n" + record["output"] if record.get("output") else None,
        ),
        Task(
            "topv2",
            _source("topv2_test.jsonl", "WillHeld/top_v2", "test"),
            ("utterance", "semantic_parse"),
            "CC-BY-SA 4.0",
            _filled("{utterance}\n"),
            _one("exact_match", lambda record, out: scores.exact(out.partition("\n")[0], record["semantic_parse"])),
            answer=_field("semantic_parse", ""),
            examples_source=_source("topv2_train.jsonl", "WillHeld/top_v2", "train"),
        ),
    )
}


def named(name: str) -> Task:
    """A task by its name, "self" for the prompts of this package, or a file of prompts. ValueError for an unknown name.

    The file has JSON lines with the key prompt (or text, or turns) and optionally reference, for exact match.
    """
    if name in TASKS:
        return TASKS[name]
    if name == SELF:
        return Task(SELF, DatasetLocation(None, str(PROMPTS)), ("prompt",), "Apache-2.0", _own)
    path = Path(name).expanduser()
    if path.suffix != ".jsonl":
        meant = did_you_mean(name, (SELF, *TASKS))
        raise ValueError(f"unknown task {name!r}{meant}; there are {', '.join((SELF, *TASKS))}, or any .jsonl file of prompts")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of prompts")
    return Task(
        path.stem,
        DatasetLocation(None, str(path.absolute())),
        (),
        "yours",
        _own,
        ScoreRule(_as_referenced),
        answer=lambda record: record.get("reference"),
        fault=_own_fault,
        category=lambda record: record.get("category"),
    )


def _own(record: Record) -> list[str]:
    if record.get("turns"):
        return list(record["turns"])
    return [record["prompt"] if record.get("prompt") else record["text"]]


def _own_fault(record: Record) -> str | None:
    turns = record.get("turns")
    if turns and not (isinstance(turns, list) and all(isinstance(turn, str) and turn for turn in turns)):
        return f"turns must be a list of texts, found {turns!r:.60}"
    for key in ("prompt", "text", "reference", "category"):
        if record.get(key) is not None and not isinstance(record[key], str):
            return f"{key} must be a text, found {record[key]!r:.60}"
    if not (turns or record.get("prompt") or record.get("text")):
        return f"expected a text under prompt or text, or a list of texts under turns, found {', '.join(record) or 'nothing'}"
    return None
