"""The data sets that methods are measured on: their source, schema, prompts and scores.

Records come from the hub or, with a data folder, from files of JSON lines in the hub's schema. Only SELF is part of this
package.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from skipstone.assets import PROMPTS
from skipstone.lab.tasks import scores
from skipstone.lab.tasks.sandbox import run
from skipstone.utils.records import HubRecords, json_lines
from skipstone.utils.spelling import did_you_mean

Record = dict[str, Any]  # one record of a data set, in the data set's own schema
INDENT = " " * 4  # replaces one tab in a program


@dataclass(frozen=True)
class ScoreRule:
    """How an output is scored."""

    grade: Callable[[Record, str], dict[str, float]]  # (record, output) -> figures, each between 0 and 1
    executes: bool = False  # whether it runs the model's code
    ready: Callable[[], object] = lambda: None  # raises ImportError where a package is missing


@dataclass(frozen=True)
class DatasetLocation:
    """Where records come from."""

    hub: HubRecords | None  # None if the hub does not have them
    file: str  # JSON lines, relative to the data folder, or an absolute path


@dataclass(frozen=True)
class Task:
    """One data set."""

    name: str
    source: DatasetLocation
    fields: tuple[str, ...]  # keys that every record must have
    licence: str
    ask: Callable[[Record], list[str]]  # record -> the user's turns
    score: ScoreRule | None = None
    answer: Callable[[Record], str | None] | None = None
    """Record -> its answer, for solved examples and for the accuracy of exits; None for a record without one."""
    choices: Callable[[Record], list[str] | None] = lambda record: None  # answers to choose from, the right one among them
    examples_source: DatasetLocation | None = None  # of solved examples; None if the task has none
    keep: Callable[[Record], bool] | None = None  # filter of the records
    fault: Callable[[Record], str | None] = lambda record: None  # first fault of a record
    category: Callable[[Record], str | None] = lambda record: None  # category of a record, for tables by category
    rouge: str | None = None
    """The reference field for protocols that use ROUGE instead of the score."""
    obtain: str = ""  # how to get the records without the hub

    def records(self, data_dir: Path | None) -> list[Record]:
        """The records in order. FileNotFoundError or OSError say how to get them; ValueError for another schema."""
        found = list(filter(self.keep, self._read(self.source, data_dir, False)))
        if not found:
            place = data_dir / self.source.file if data_dir else self.source.hub
            raise ValueError(f"task {self.name} has no records in {place}")
        return found

    def examples(self, count: int, data_dir: Path | None) -> list[Record]:
        """The first `count` solved examples. ValueError for a task without any."""
        if not count:
            return []
        if self.examples_source is None:
            raise ValueError(f"task {self.name} has no examples to show: give no shots")
        return list(islice(self._read(self.examples_source, data_dir, True), count))

    def _read(self, source: DatasetLocation, data_dir: Path | None, streaming: bool) -> Iterator[Record]:
        if data_dir is not None or Path(source.file).is_absolute():
            path = (data_dir or Path()) / source.file
            if not path.is_file():
                raise FileNotFoundError(f"task {self.name}: {data_dir} holds no {source.file}. {self._how_to_get_it()}")
            placed = json_lines(path)
        elif source.hub is None:
            raise FileNotFoundError(f"task {self.name} is not on the hub. {self._how_to_get_it()}")
        else:
            placed = source.hub.read(f"task {self.name}", "or give a folder of files with --data-dir", streaming)
        return (self._checked(*one) for one in placed)

    def _checked(self, place: str, record: Any) -> Record:
        if missing := [name for name in self.fields if not isinstance(record, dict) or name not in record]:
            raise ValueError(f"{place}: task {self.name} needs {', '.join(self.fields)}; {missing[0]!r} is missing")
        if not isinstance(record, dict):
            raise ValueError(f"{place}: expected an object, found {record!r:.60}")
        if (fault := self.fault(record)) is not None:
            raise ValueError(f"{place}: {fault}")
        return record

    def _how_to_get_it(self) -> str:
        """How to get the records into a data folder."""
        hub = self.source.hub
        if self.obtain or hub is None:
            return self.obtain
        name = f', "{hub.config}"' if hub.config else ""
        load = f'datasets.load_dataset("{hub.path}"{name}, split="{hub.split}").to_json("{self.source.file}")'
        return f"With a network: {load}, then --data-dir with the folder of that file"


def prompt_of(task: Task, record: Record, shown: Sequence[Record]) -> list[str]:
    """The turns of a record, with solved examples before the first turn."""
    turns = task.ask(record)
    if task.answer is None or not shown:
        return turns
    before = "".join(f"{task.ask(one)[0]}{task.answer(one)}\n\n" for one in shown)
    return [before + turns[0], *turns[1:]]


def tabbed(text: str) -> str:
    """Indent with tabs, as the code of SWIFT and of Draft & Verify does in prompts."""
    return text.replace(INDENT, "\t")


def untabbed(text: str) -> str:
    """Indent with spaces again."""
    return text.replace("\t", INDENT)


SELF = "self"  # the prompts of this package
SPEC_BENCH = "spec-bench"
BEGINNING = 32  # words of a story in the prompt


def _filled(template: str) -> Callable[[Record], list[str]]:
    return lambda record: [template.format(**record)]


def _field(name: str, before: str = " ") -> Callable[[Record], str]:
    return lambda record: f"{before}{record[name]}"


def _get(name: str) -> Callable[[Record], Any]:
    return lambda record: record.get(name)


def _mmlu(record: Record) -> list[str]:
    """Hendrycks et al. (arXiv 2009.03300): the question, lettered choices, "Answer:"."""
    choices = "".join(f"{letter}. {text}\n" for letter, text in zip("ABCD", record["choices"], strict=True))
    return [f"{record['question']}\n{choices}Answer:"]


def _mbpp(record: Record) -> list[str]:
    """Austin et al. (arXiv 2108.07732), section 3."""
    tests = "\n".join(record["test_list"])
    task = f"You are an expert Python programmer, and here is your task: {record['text']}"
    return [f"{task} Your code should pass these tests:\n\n{tests}\n[BEGIN]\n"]


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


def _passes(program: Callable[[Record, str], str]) -> ScoreRule:
    """Whether a program of the output runs to its end."""
    return _one("pass", lambda record, output: run(program(record, output)).passed, executes=True)


SOURCES = {
    "humaneval": ("openai/openai_humaneval", None, "test", None, "MIT", ("task_id", "prompt", "entry_point", "test")),
    "mbpp": ("google-research-datasets/mbpp", "full", "test", "prompt", "CC-BY 4.0", ("task_id", "text", "code", "test_list")),
    "gsm8k": ("openai/gsm8k", "main", "test", "train", "MIT", ("question", "answer")),
    "cnn_dm": ("abisee/cnn_dailymail", "3.0.0", "test", "train", "Apache-2.0", ("article", "highlights")),
    "xsum": ("EdinburghNLP/xsum", None, "test", "train", "not stated on the hub", ("document", "summary")),
    "mmlu": ("cais/mmlu", "all", "validation", "dev", "MIT", ("question", "choices", "answer")),
    "tinystories": ("roneneldan/TinyStories", None, "validation", "train", "CDLA-Sharing-1.0", ("text",)),
    "alpaca": ("tatsu-lab/alpaca", None, "train", None, "CC-BY-NC 4.0", ("instruction", "input")),
    "topv2": ("WillHeld/top_v2", None, "test", "train", "CC-BY-SA 4.0", ("utterance", "semantic_parse")),
}
"""Task -> its data set on the hub: path, config, split, split of the solved examples, licence, keys of every record."""
WITHOUT_SPLIT = ("humaneval_test", "mbpp_test")  # splits whose files are called by the task alone


def _of_hub(name: str, ask: Callable[[Record], list[str]], score: ScoreRule | None = None, **more: Any) -> Task:
    path, config, split, examples, licence, fields = SOURCES[name]

    def place(part: str) -> DatasetLocation:
        file = f"{name}.jsonl" if f"{name}_{part}" in WITHOUT_SPLIT else f"{name}_{part}.jsonl"
        return DatasetLocation(HubRecords(path, part, config, extra="bench"), file)

    return Task(name, place(split), fields, licence, ask, score, examples_source=examples and place(examples), **more)


TASKS = {
    task.name: task
    for task in (
        _of_hub(
            "humaneval",
            _filled("{prompt}"),
            _passes(scores.human_eval_program),
            answer=_get("canonical_solution"),
            rouge="canonical_solution",
        ),
        _of_hub(
            "mbpp",
            _mbpp,
            _passes(scores.mbpp_program),
            answer=lambda record: f"{record['code']}\n[DONE]",
            keep=lambda record: 11 <= record.get("task_id", 11) <= 510,  # the test part, should the file hold all of it
        ),
        _of_hub(
            "gsm8k",
            _filled("Question: {question}\nAnswer:"),
            _one("exact_match", lambda record, output: scores.same_number(output, record["answer"])),
            answer=_field("answer"),
        ),
        Task(
            SPEC_BENCH,
            DatasetLocation(None, "spec_bench.jsonl"),
            ("question_id", "category", "turns"),
            "Apache-2.0",
            lambda record: list(record["turns"]),
            category=lambda record: str(record["category"]),
            obtain="Save data/spec_bench/question.jsonl of the repository hemingkx/Spec-Bench as spec_bench.jsonl in a folder, "
            "and give that folder with --data-dir",
        ),
        _of_hub("cnn_dm", _filled("Article: {article}\nSummary:"), rouge("highlights"), answer=_field("highlights")),
        _of_hub("xsum", _filled("Article: {document}\nSummary:"), rouge("summary"), answer=_field("summary")),
        _of_hub(
            "mmlu",
            _mmlu,
            _one("accuracy", lambda record, output: scores.choice(output) == "ABCD"[record["answer"]]),
            answer=lambda record: f" {'ABCD'[record['answer']]}",
            choices=lambda record: [" A", " B", " C", " D"],
        ),
        _of_hub("tinystories", _story, answer=_rest_of_story),
        _of_hub("alpaca", _alpaca, answer=lambda record: "\n\n" + record["output"] if record.get("output") else None),
        _of_hub(
            "topv2",
            _filled("{utterance}\n"),
            _one("exact_match", lambda record, output: scores.exact(output.partition("\n")[0], record["semantic_parse"])),
            answer=_field("semantic_parse", ""),
        ),
    )
}


def named(name: str) -> Task:
    """A task by its name, "self" for the prompts of this package, or a file of prompts. ValueError for an unknown name.

    `spec-bench.translation` is the task spec-bench with the records of this category only.
    The file has JSON lines with the key prompt (or text, or turns) and optionally reference, for exact match, and choices, for
    the choice of every exit.
    """
    if name in TASKS:
        return TASKS[name]
    whole, _, category = name.partition(".")
    if whole == SPEC_BENCH:
        return replace(TASKS[whole], name=name, keep=lambda record: record["category"] == category)
    if name == SELF:
        return Task(SELF, DatasetLocation(None, str(PROMPTS)), ("prompt",), "Apache-2.0", _own)
    path = Path(name).expanduser()
    if path.suffix != ".jsonl":
        meant = did_you_mean(name, (SELF, *TASKS))
        raise ValueError(f"unknown task {name!r}{meant}; there are {', '.join((SELF, *TASKS))}, or any .jsonl file of prompts")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of prompts")
    own: dict[str, Any] = {"answer": _get("reference"), "choices": _get("choices")}
    own |= {"fault": _own_fault, "category": _get("category")}
    return Task(path.stem, DatasetLocation(None, str(path.absolute())), (), "yours", _own, ScoreRule(_as_referenced), **own)


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
    if (choices := record.get("choices")) is not None:
        is_texts = isinstance(choices, list) and all(isinstance(choice, str) and choice.strip() for choice in choices)
        if not (is_texts and record.get("reference") in choices):
            return f"choices must be a list of texts with the reference among them, found {choices!r:.60}"
    if not (turns or record.get("prompt") or record.get("text")):
        return f"expected a text under prompt or text, or a list of texts under turns, found {', '.join(record) or 'nothing'}"
    return None
