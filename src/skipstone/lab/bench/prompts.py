"""The prompts of a task: which are asked, and one prompt asked of every engine, timed, scored, and put into one line."""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.stats import Stats
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.bench.plan import BenchPlan, chooses
from skipstone.lab.bench.run_file import Line, RunFile
from skipstone.lab.tasks.dialogue import PromptBuilder, Said, TaskConversation, digest
from skipstone.lab.tasks.protocols import TaskSettings
from skipstone.lab.tasks.task import Task, prompt_of, tabbed, untabbed
from skipstone.lab.timing.measure import GenerationBackend, Measurement, measure, options_for
from skipstone.lab.timing.statistics import LOOPING, repeated_share

USUAL_PROMPTS = 20  # how many are reported where neither a plan nor a protocol says
CHUNK = 256  # positions whose logits exist at once
NOT_HOW = ("num_prompts", "skip_looping", "ours")  # settings of a task that do not change how a prompt is asked

Both = tuple[
    list[TaskConversation], list[TaskConversation]
]  # prompts to choose settings on, and prompts to report; none is in both


def conversations(task: Task, settings: TaskSettings, plan: BenchPlan, data: Path | None) -> Both:
    """Prompts drawn by the seed; every category of a task gives as many as any, while it has them. With `skip_looping` the
    prompts to report are all but those to choose settings on, in the order in which they are to be tried; what takes the place
    of a prompt may be of another category. ValueError where there are too few."""
    records, shown = task.records(data), task.examples(settings.shots, data)
    places = drawn([*map(task.category, records)], plan.seed)
    spare = plan.tune_prompts if chooses(plan) else 0
    wanted = reported(settings, len(records) - spare)
    tuned = min(spare, max(0, len(records) - wanted))
    if wanted > len(records):
        raise ValueError(f"task {task.name} has {len(records)} prompts, {wanted} are asked for")
    if spare and (wanted < 1 or not tuned):
        raise ValueError(
            f"settings are to be chosen on prompts that are not reported, and {task.name} has {len(records)} in all: lower "
            "num_prompts or tune_prompts, or say which settings to take"
        )

    def made(place: int) -> TaskConversation:
        turns = prompt_of(task, records[place], shown)
        turns = tuple(map(tabbed, turns) if settings.tabs else turns)
        return TaskConversation(f"{task.name} {place}", turns, record=records[place])

    tried = places[:wanted] + places[wanted + tuned :] if settings.skip_looping else sorted(places[:wanted])
    return [made(place) for place in places[wanted : wanted + tuned]], [made(place) for place in tried]


def reported(settings: TaskSettings, prompts: int) -> int:
    """How many prompts are to be reported where so many are left."""
    if settings.num_prompts is not None:
        return settings.num_prompts
    return prompts if settings.protocol else min(USUAL_PROMPTS, prompts)


def drawn(categories: Sequence[str | None], seed: int) -> list[int]:
    """All places in a random order that takes turns between categories."""
    places = list(range(len(categories)))
    random.Random(seed).shuffle(places)
    piles: dict[str | None, list[int]] = {}
    for place in places:
        piles.setdefault(categories[place], []).append(place)
    return [place for turn in zip_longest(*piles.values()) for place in turn if place is not None]


def fingerprint(both: Both) -> str:
    """A hash of all that is asked, to tell whether a run that goes on asks the same."""
    return digest([ord(letter) for part in both for one in part for letter in one.digest])


@dataclass(frozen=True)
class TaskRun:
    """A task of a plan on a model."""

    model: str
    number: int  # the task's place in the plan, for the same task may stand there twice
    task: Task
    settings: TaskSettings
    reader: PromptBuilder
    plan: BenchPlan

    def key(self) -> dict[str, Any]:
        """What its lines begin with. question: a hash of how it is asked."""
        asked = {name: value for name, value in asdict(self.settings).items() if name not in NOT_HOW}
        return {
            "model": self.model,
            "number": self.number,
            "task": self.task.name,
            "temperature": self.settings.temperature,
            "question": digest(list(json.dumps({**asked, "ignore_eos": self.plan.ignore_eos}, sort_keys=True).encode())),
        }

    def wanted(self, prompts: int) -> int:
        """How many of some prompts are to be reported: all, but for `skip_looping`, which draws more than are asked for."""
        return min(prompts, reported(self.settings, prompts)) if self.settings.skip_looping else prompts

    def lines(self, journal: RunFile, kind: str) -> list[Line]:
        """Its lines of a kind."""
        key = self.key()
        return [line for line in journal.lines_of(kind) if all(line[name] == value for name, value in key.items())]

    def options(self, max_new_tokens: int) -> dict[str, Any]:
        """Options of `model.generate` for its calls."""
        return options_for(max_new_tokens, self.settings.temperature, self.settings.top_p)

    def answers(self, asked: Sequence[TaskConversation], most: int) -> list[tuple[Tensor, Tensor]]:
        """(prompt [T], answer [A]) int64 of conversations of one turn whose record holds an answer, at most `most` positions
        together."""
        found = []
        for one in asked:
            if len(one) == 1 and self.task.answer is not None and (text := self.task.answer(one.record)):
                prompt = self.reader.ids(one)
                answer = self.reader.continuation(tabbed(text) if self.settings.tabs else text)
                found.append((prompt, answer[: most - len(prompt)]))
        return [(prompt, answer) for prompt, answer in found if len(answer)]


@dataclass
class PromptAnswers:
    """What one engine gave for one prompt, over all turns and samples."""

    measurements: list[Measurement] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)
    log_likelihood: float | None = None  # of all tokens under the target, in nats, where that was asked for

    def report(self) -> dict[str, Any]:
        """Plain JSON values. Seconds are summed over calls; repeated_share is weighed by tokens."""
        calls = self.measurements
        tokens = sum(len(one.tokens) for one in calls)
        pairs = zip(self.prompts, calls, strict=True)
        looped = sum(repeated_share(prompt, one.tokens) * len(one.tokens) for prompt, one in pairs)
        firsts = [one.first_seconds for one in calls if one.first_seconds is not None]
        stats = [one.stats for one in calls if one.stats is not None]
        return {
            "tokens": tokens,
            "seconds": sum(one.seconds for one in calls),
            "first_seconds": sum(firsts) if len(firsts) == len(calls) else None,
            "setup_seconds": sum(one.setup_seconds for one in calls),
            "calls": len(calls),
            "digests": [digest(one.tokens) for one in calls],
            "repeated_share": looped / tokens if tokens else 0.0,
            "memory": max((one.memory for one in calls if one.memory is not None), default=None),
            "log_likelihood": self.log_likelihood,
            "scores": self.scores,
            "texts": self.texts,
            "stats": Stats.total(stats).summary() if stats else None,
            "known": next((one.known for one in reversed(calls) if one.known), None),
            "grown": add_counts([one.grown for one in calls if one.grown]),
        }


def add_counts(counts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The sums of counts, at any depth."""
    if not counts:
        return None
    names = list(dict.fromkeys(name for one in counts for name in one))
    columns = {name: [one[name] for one in counts if name in one] for name in names}
    return {name: add_counts(column) if isinstance(column[0], dict) else sum(column) for name, column in columns.items()}


def ask(
    model: PreTrainedModel, engines: Mapping[str, GenerationBackend], one: TaskConversation, index: int, run: TaskRun
) -> Line:
    """Every engine on one prompt, in rotating order, so that a machine that slows down slows all of them.

    The answer that a second turn follows is the first engine's, for all: they are asked the same.
    """
    answers = {label: PromptAnswers() for label in engines}
    labels = list(engines)
    options = run.options(run.settings.max_new_tokens)
    lengths, cut = [], 0
    for sample in range(run.settings.samples):
        said: list[Said] = []
        for turn in range(len(one)):
            ids = run.reader.ids(one, said)
            lengths.append(len(ids))
            cut += run.reader.cuts(one, said)
            first = (index + sample + turn) % len(labels)
            for label in labels[first:] + labels[:first]:
                found = measure(model, engines[label], ids, options, run.plan.seed + 1000 * index + sample)
                answers[label].measurements.append(found)
                answers[label].prompts.append(ids.tolist())
                answers[label].texts.append(run.reader.text(found.tokens))
            said.append(("" if one.ids is not None else one.turns[turn], answers[labels[0]].texts[-1]))
    _score(answers, one, run)
    if not all(engine.lossless for engine in engines.values()):
        _weigh(model, answers)
    return {
        "kind": "prompt",
        **run.key(),
        "index": index,
        "source": one.source,
        "category": run.task.category(one.record),
        "digest": one.digest,
        "prompt_tokens": lengths,
        "cut": cut,
        "rows": {label: found.report() for label, found in answers.items()},
    }


def is_calm(line: Line) -> bool:
    """Whether no method repeats itself on a prompt, by its line: the headline's figures are of such prompts."""
    return all(row["repeated_share"] < LOOPING for row in line["rows"].values())


def looping(model: PreTrainedModel, plain: GenerationBackend, one: TaskConversation, index: int, run: TaskRun) -> Line | None:
    """The line of a prompt that is left out, because at least LOOPING of what plain greedy decoding says over all turns is a
    repetition; None for one that is to be asked."""
    options, said = options_for(run.settings.max_new_tokens, 0.0, 1.0), list[Said]()
    looped = tokens = 0.0
    for turn in range(len(one)):
        ids = run.reader.ids(one, said)
        found = measure(model, plain, ids, options, run.plan.seed).tokens
        looped, tokens = looped + repeated_share(ids.tolist(), found) * len(found), tokens + len(found)
        said.append(("" if one.ids is not None else one.turns[turn], run.reader.text(found)))
    share = looped / tokens if tokens else 0.0
    if share < LOOPING:
        return None
    return {"kind": "looping", **run.key(), "index": index, "digest": one.digest, "repeated_share": share}


def _weigh(model: PreTrainedModel, answers: dict[str, PromptAnswers]) -> None:
    """How likely the target finds every engine's texts; the same text is asked for once."""

    @cache
    def nats(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> float:
        return log_likelihood(model, torch.tensor(prompt, dtype=torch.int64, device="cpu"), [*tokens])

    for found in answers.values():
        pairs = zip(found.prompts, found.measurements, strict=True)
        found.log_likelihood = sum(nats(tuple(prompt), tuple(measured.tokens)) for prompt, measured in pairs)


@torch.inference_mode()
def log_likelihood(model: PreTrainedModel, prompt: Tensor, answer: list[int]) -> float:
    """Sum over an answer's tokens of log p, in nats, at temperature 1, each after all before it. prompt: [T] int64, T >= 1."""
    if not answer:
        return 0.0
    runner = ModelRunner(model)
    wanted = torch.tensor(answer, dtype=torch.int64, device=runner.device)  # [A]
    ids = torch.cat([prompt.to(runner.device), wanted[:-1]])[None]  # [1, T + A - 1]
    if runner.engine.quantize is None:
        states = runner.decoder(input_ids=ids, use_cache=False).last_hidden_state
    else:  # transformers' modules have other weights
        states = runner.read(ids)
    states = states[:, len(prompt) - 1 :]  # [1, A, d]
    total = torch.zeros((), dtype=torch.double, device=runner.device)
    for part, tokens in zip(states.split(CHUNK, 1), wanted.split(CHUNK), strict=True):
        total += runner.project(part)[0].double().log_softmax(-1).gather(1, tokens[:, None]).sum()
    return float(total)


def _score(answers: dict[str, PromptAnswers], one: TaskConversation, run: TaskRun) -> None:
    """Scores of every sample's last turn. The same text is scored once: lossless engines all say the same."""
    score = run.task.score
    if score is None or (score.executes and not run.plan.allow_code_execution):
        return

    @cache
    def grade(text: str) -> dict[str, float]:
        return score.grade(one.record, untabbed(text) if run.settings.tabs else text)

    for found in answers.values():
        found.scores += map(grade, found.texts[len(one) - 1 :: len(one)])
