"""The prompts of a task: which are measured, and one prompt given to every method, timed, scored and written as one line."""

import json
import random
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skipstone.decoding.stats import Stats
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.bench.draft_weights import share_read
from skipstone.lab.bench.plan import BASELINE, BenchPlan, has_choices
from skipstone.lab.bench.run_file import Line, RunFile
from skipstone.lab.tasks.data_sets import Task, prompt_of, tabbed, untabbed
from skipstone.lab.tasks.dialogue import AnswerTokens, PromptBuilder, Said, TaskConversation, digest
from skipstone.lab.tasks.protocols import TaskSettings
from skipstone.lab.timing.measure import GenerationBackend, Measurement, MethodBackend, measure, options_for
from skipstone.lab.timing.statistics import LOOPING, repeated_share
from skipstone.methods.early_exit import EarlyExit
from skipstone.utils.processor_watch import ProcessorWatch

USUAL_PROMPTS = 20  # prompts to report if neither the plan nor a protocol says
CHUNK = 256  # positions whose logits exist at once
NOT_ASKED = ("num_prompts", "places", "skip_looping", "ours")  # settings of a task that do not change its prompts

PromptSplit = tuple[list[TaskConversation], list[TaskConversation]]  # disjoint prompts for choices, and to report
AnsweredPrompt = tuple[Tensor, list[AnswerTokens]]  # ids [T] int64, and answers: the right one, then the wrong choices if any


def conversations(task: Task, settings: TaskSettings, plan: BenchPlan, data: Path | None) -> PromptSplit:
    """The prompts that `places` names, else drawn by the seed, as evenly over the task's categories as possible.

    ValueError if there are too few.

    With `skip_looping` the prompts to report are all but those for choices, in the order in which they are to be tried.
    """
    records, examples = task.records(data), task.examples(settings.shots, data)
    places = draw_places([*map(task.category, records)], plan.seed)
    if settings.places is not None:
        if beyond := [place for place in settings.places if place >= len(records)]:
            raise ValueError(f"task {task.name} has {len(records)} prompts, none at place {beyond[0]}")
        places = [*settings.places, *(place for place in places if place not in settings.places)]
    spare = plan.tune_prompts if has_choices(plan) else 0
    wanted = num_reported(settings, len(records) - spare)
    tuned = min(spare, max(0, len(records) - wanted))
    if wanted > len(records):
        raise ValueError(f"task {task.name} has {len(records)} prompts, {wanted} are asked for")
    if spare and (wanted < 1 or not tuned):
        raise ValueError(f"choices need prompts, and {task.name} has {len(records)} in all: lower num_prompts or tune_prompts")

    def converse(place: int) -> TaskConversation:
        turns = prompt_of(task, records[place], examples)
        turns = tuple(map(tabbed, turns) if settings.tabs else turns)
        return TaskConversation(f"{task.name} {place}", turns, record=records[place], place=place)

    tried = places[:wanted] + places[wanted + tuned :] if settings.skip_looping else sorted(places[:wanted])
    if settings.places is not None:
        tried = [*settings.places]
    return [*map(converse, places[wanted : wanted + tuned])], [*map(converse, tried)]


def num_reported(settings: TaskSettings, available: int) -> int:
    """Number of prompts to report."""
    if settings.places is not None:
        return len(settings.places)
    if settings.num_prompts is not None:
        return settings.num_prompts
    return available if settings.protocol else min(USUAL_PROMPTS, available)


def draw_places(categories: Sequence[str | None], seed: int) -> list[int]:
    """All places in a random order, round-robin over their categories."""
    places = list(range(len(categories)))
    random.Random(seed).shuffle(places)
    by_category: dict[str | None, list[int]] = {}
    for place in places:
        by_category.setdefault(categories[place], []).append(place)
    return [place for turn in zip_longest(*by_category.values()) for place in turn if place is not None]


def fingerprint(prompts: PromptSplit) -> str:
    """A hash of all prompts. A resumed run must have the same."""
    return digest([ord(letter) for part in prompts for one in part for letter in one.digest])


@dataclass(frozen=True)
class BenchModel:
    """A model under test."""

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None  # None for a synthetic model
    synthetic: dict[str, Any] | None = None  # the report of a synthetic model


@dataclass(frozen=True)
class TaskRun:
    """A task of a plan on a model, and the file of its lines."""

    subject: BenchModel
    number: int  # the task's index in the plan; the same task may occur twice
    task: Task
    settings: TaskSettings
    builder: PromptBuilder
    plan: BenchPlan
    journal: RunFile

    @property
    def model(self) -> PreTrainedModel:
        return self.subject.model

    @property
    def title(self) -> str:
        """What progress and messages call it."""
        return f"{self.subject.name}, {self.task.name}"

    def key(self) -> dict[str, Any]:
        """The beginning of its lines. question: a hash of the settings that change prompts or texts."""
        settings = {name: value for name, value in asdict(self.settings).items() if name not in NOT_ASKED}
        return {
            "model": self.subject.name,
            "number": self.number,
            "task": self.task.name,
            "temperature": self.settings.temperature,
            "question": digest(list(json.dumps({**settings, "ignore_eos": self.plan.ignore_eos}, sort_keys=True).encode())),
        }

    def num_wanted(self, prompts: int) -> int:
        """Number of prompts to report. `skip_looping` has more prompts than that."""
        return min(prompts, num_reported(self.settings, prompts))

    def lines(self, kind: str) -> list[Line]:
        """Its lines of a kind."""
        key = self.key().items()
        return [line for line in self.journal.lines_of(kind) if key <= line.items()]

    def add(self, kind: str, **values: Any) -> Line:
        """Write a line of its own. Returns it."""
        line = {"kind": kind, **self.key(), **values}
        self.journal.add(line)
        return line

    def options(self, max_new_tokens: int) -> dict[str, Any]:
        """Options of `model.generate` for its calls."""
        return options_for(max_new_tokens, self.settings.temperature, self.settings.top_p)

    def answers(self, prompts: Sequence[TaskConversation], max_positions: int) -> list[AnsweredPrompt]:
        """The single-turn prompts with an answer in their record that fit into max_positions with every choice."""
        pairs = []
        for one in prompts:
            if len(one) == 1 and self.task.answer is not None and (right := self.task.answer(one.record) or "").strip():
                texts = dict.fromkeys([right, *(self.task.choices(one.record) or ())])
                answers = [self.builder.answer(tabbed(text) if self.settings.tabs else text) for text in texts]
                pairs.append((self.builder.ids(one), answers))
        return [pair for pair in pairs if len(pair[0]) + max(len(answer.ids) for answer in pair[1]) <= max_positions]


@dataclass
class PromptAnswers:
    """The answers of one method to one prompt, over all turns and samples."""

    measurements: list[Measurement] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)
    log_likelihood: float | None = None  # of all tokens under the target, in nats, if it was measured

    def add(self, measurement: Measurement, prompt: Tensor, builder: PromptBuilder) -> str:
        """Add a call. Returns its text."""
        self.measurements.append(measurement)
        self.prompts.append(prompt.tolist())
        self.texts.append(builder.text(measurement.tokens))
        return self.texts[-1]

    @property
    def repeated_share(self) -> float:
        """Share of repeated n-grams, over the tokens of all calls."""
        pairs = [(prompt, call.tokens) for prompt, call in zip(self.prompts, self.measurements, strict=True)]
        repeated, tokens = (sum(repeated_share(*pair) * len(pair[1]) for pair in pairs), sum(len(text) for _, text in pairs))
        return repeated / tokens if tokens else 0.0

    def report(self) -> dict[str, Any]:
        """The row as plain JSON values. Seconds are summed over calls."""
        calls = self.measurements
        firsts = [one.first_seconds for one in calls if one.first_seconds is not None]
        stats = [one.stats for one in calls if one.stats is not None]
        return {
            "tokens": sum(len(one.tokens) for one in calls),
            "seconds": sum(one.seconds for one in calls),
            "first_seconds": sum(firsts) if len(firsts) == len(calls) else None,
            "setup_seconds": sum(one.setup_seconds for one in calls),
            "calls": len(calls),
            "digests": [digest(one.tokens) for one in calls],
            "repeated_share": self.repeated_share,
            "memory": max((one.memory for one in calls if one.memory is not None), default=None),
            "log_likelihood": self.log_likelihood,
            "scores": self.scores,
            "texts": self.texts,
            "stats": Stats.total(stats).summary() if stats else None,
            "known": next((one.known for one in reversed(calls) if one.known), None),
            "grown": add_counts([one.grown for one in calls if one.grown]),
        }


def add_counts(counts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The sums of nested counts."""
    if not counts:
        return None
    names = list(dict.fromkeys(name for one in counts for name in one))
    columns = {name: [one[name] for one in counts if name in one] for name in names}
    return {name: add_counts(column) if isinstance(column[0], dict) else sum(column) for name, column in columns.items()}


def ask(engines: Mapping[str, GenerationBackend], one: TaskConversation, index: int, run: TaskRun) -> Line:
    """Give one prompt to every engine and write its line.

    The order of the engines rotates, so that a machine that slows down slows all of them. A second turn follows the answer of
    plain decoding, else of the first engine, for all engines: they get the same prompts.
    """
    answers = {label: PromptAnswers() for label in engines}
    labels = list(engines)
    plain = (label for label, engine in engines.items() if isinstance(engine, MethodBackend) and engine.method.name == BASELINE)
    leader = answers[next(plain, labels[0])]
    options = run.options(run.settings.max_new_tokens)
    # while another process works, this one's waiting says nothing
    watches = {label: ProcessorWatch() for label, engine in engines.items() if not engine.elsewhere}
    lengths, cut = [], 0
    for sample in range(run.settings.samples):
        said: list[Said] = []
        for turn in range(len(one)):
            ids = run.builder.ids(one, said)
            lengths.append(len(ids))
            cut += run.builder.cuts(one, said)
            first = (index + sample + turn) % len(labels)
            for label in labels[first:] + labels[:first]:
                with watches.get(label, nullcontext()):
                    measurement = measure(run.model, engines[label], ids, options, run.plan.seed + 1000 * one.place + sample)
                answers[label].add(measurement, ids, run.builder)
            said.append((one.turn(turn), leader.texts[-1]))
    _score(answers, one, run)
    if not all(engine.lossless for engine in engines.values()):
        _add_log_likelihoods(run.model, answers)
    about = {"index": index, "place": one.place, "category": run.task.category(one.record), "digest": one.digest}
    if len(lengths) > 1:
        about["asked"] = digest([token for ids in leader.prompts for token in ids])
    shares = [watch.waited_share for watch in (ProcessorWatch(*watches.values()), *watches.values())]
    about["waited_share"] = max((share for share in shares if share is not None), default=None)
    rows, runner = {label: own.report() for label, own in answers.items()}, ModelRunner(run.model)
    for label, engine in engines.items():
        if isinstance(engine, MethodBackend):
            rows[label]["weights_read"] = share_read(engine.method, runner, rows[label])
    return run.add("prompt", **about, prompt_tokens=lengths, cut=cut, rows=rows)


def is_calm(line: Line, methods: Mapping[str, str]) -> bool:
    """Whether no method repeats itself on a prompt. The headline's figures are of such prompts.

    methods: label -> name of the method. An early exit alone does not count: it is as fast whatever it says.
    """
    counted = (row for label, row in line["rows"].items() if methods.get(label) != EarlyExit.name)
    return all(row["repeated_share"] < LOOPING for row in counted)


def is_looping(plain: GenerationBackend, one: TaskConversation, index: int, run: TaskRun) -> bool:
    """Whether a prompt is left out because plain greedy decoding repeats itself. If so, a line says it.

    It repeats itself if the share of repeated n-grams over all turns is at least LOOPING.
    """
    options, said, answers = options_for(run.settings.max_new_tokens), list[Said](), PromptAnswers()
    for turn in range(len(one)):
        ids = run.builder.ids(one, said)
        said.append((one.turn(turn), answers.add(measure(run.model, plain, ids, options, run.plan.seed), ids, run.builder)))
    if answers.repeated_share < LOOPING:
        return False
    run.add("looping", index=index, digest=one.digest, repeated_share=answers.repeated_share)
    return True


def _add_log_likelihoods(model: PreTrainedModel, answers: dict[str, PromptAnswers]) -> None:
    """Score every engine's texts under the target; equal texts are scored once."""

    @cache
    def nats(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
        return log_likelihood(model, torch.tensor(prompt, dtype=torch.int64, device="cpu"), [*tokens])

    for own in answers.values():
        pairs = zip(own.prompts, own.measurements, strict=True)
        own.log_likelihood = sum(nats(tuple(prompt), tuple(call.tokens)) for prompt, call in pairs)


@torch.inference_mode()
def log_likelihood(model: PreTrainedModel, prompt: Tensor, answer: list[int]) -> float:
    """Sum of log p over an answer's tokens in nats, at temperature 1. prompt: [T] int64, T >= 1."""
    if not answer:
        return 0.0
    runner = ModelRunner(model)
    targets = torch.tensor(answer, dtype=torch.int64, device=runner.device)  # [A]
    ids = torch.cat([prompt.to(runner.device), targets[:-1]])[None]  # [1, T + A - 1]
    states = runner.read(ids)[:, len(prompt) - 1 :]  # [1, A, d]
    total = torch.zeros((), dtype=torch.double, device=runner.device)
    for part, tokens in zip(states.split(CHUNK, 1), targets.split(CHUNK), strict=True):
        total += runner.project(part)[0].double().log_softmax(-1).gather(1, tokens[:, None]).sum()
    return float(total)


def _score(answers: dict[str, PromptAnswers], one: TaskConversation, run: TaskRun) -> None:
    """Score every sample's last turn. Equal texts are scored once, because lossless engines give the same."""
    score = run.task.score
    if score is None or (score.executes and not run.plan.allow_code_execution):
        return

    @cache
    def grade(text: str) -> dict[str, float]:
        return score.grade(one.record, untabbed(text) if run.settings.tabs else text)

    for own in answers.values():
        own.scores += map(grade, own.texts[len(one) - 1 :: len(one)])
