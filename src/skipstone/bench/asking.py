"""One prompt asked of every row: all its turns and samples, timed, scored, and put into one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.bench.journal import Line
from skipstone.bench.likelihood import log_likelihood
from skipstone.bench.plan import Plan, Question
from skipstone.bench.report.figures import merged
from skipstone.tasks.dialogue import Conversation, Reader, Said, digest
from skipstone.tasks.task import Task, tabbed, untabbed
from skipstone.timing.measure import Measurement, Row, measure, rotated
from skipstone.timing.statistics import repeated_share


@dataclass(frozen=True)
class Cell:
    """A task of a plan on a model. number: the task's place in the plan, for the same task may stand there twice."""

    model: str
    number: int
    task: Task
    question: Question
    reader: Reader
    plan: Plan

    def key(self) -> dict[str, Any]:
        """What its lines begin with."""
        asked = {**self.question.model_dump(exclude={"num_prompts"}), "ignore_eos": self.plan.ignore_eos}
        return {
            "model": self.model,
            "number": self.number,
            "task": self.task.name,
            "temperature": self.question.temperature,
            "question": digest(list(json.dumps(asked, sort_keys=True).encode())),
        }

    def answers(self, asked: Sequence[Conversation], most: int) -> list[tuple[Tensor, Tensor]]:
        """(prompt [T], answer [A]) int64 of conversations of one turn whose record holds an answer, at most `most` positions
        together."""
        found = []
        for one in asked:
            text = self.task.answer(one.row) if self.task.answer is not None and len(one) == 1 else None
            if text:
                prompt = self.reader.ids(one)
                answer = self.reader.continuation(tabbed(text) if self.question.tabs else text)[: most - len(prompt)]
                found.append((prompt, answer))
        return [(prompt, answer) for prompt, answer in found if len(answer)]

    def owns(self, line: Line) -> bool:
        """Whether a line belongs to it."""
        return all(line[name] == value for name, value in self.key().items())


@dataclass
class Answers:
    """What one row gave for one prompt, over all turns and samples."""

    measurements: list[Measurement] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    scores: list[dict[str, float]] = field(default_factory=list)
    log_likelihood: float | None = None

    def report(self) -> dict[str, Any]:
        """Plain JSON values. seconds, first_seconds, setup_seconds: summed over calls; repeated_share: weighed by tokens;
        log_likelihood: of all tokens under the target, where that was asked for."""
        tokens = [token for m in self.measurements for token in m.tokens]
        looped = sum(
            repeated_share(prompt, m.tokens) * len(m.tokens) for prompt, m in zip(self.prompts, self.measurements, strict=True)
        )
        firsts = [m.first for m in self.measurements if m.first is not None]
        memory = [m.memory for m in self.measurements if m.memory is not None]
        stats = [m.stats for m in self.measurements if m.stats is not None]
        return {
            "tokens": len(tokens),
            "seconds": sum(m.seconds for m in self.measurements),
            "first_seconds": sum(firsts) if len(firsts) == len(self.measurements) else None,
            "setup_seconds": sum(m.setup for m in self.measurements),
            "calls": len(self.measurements),
            "digests": [digest(m.tokens) for m in self.measurements],
            "repeated_share": looped / len(tokens) if tokens else 0.0,
            "memory": max(memory) if memory else None,
            "log_likelihood": self.log_likelihood,
            "scores": self.scores,
            "texts": self.texts,
            "stats": merged(stats).summary() if stats else None,
            "known": next((m.known for m in reversed(self.measurements) if m.known), None),
            "grown": _added([m.grown for m in self.measurements if m.grown]),
        }


def _added(counts: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """The sums of counts, at any depth."""
    if not counts:
        return None
    names = list(dict.fromkeys(name for one in counts for name in one))
    columns = {name: [one[name] for one in counts if name in one] for name in names}
    return {name: _added(column) if isinstance(column[0], dict) else sum(column) for name, column in columns.items()}


def ask(model: PreTrainedModel, rows: Sequence[Row], one: Conversation, index: int, cell: Cell) -> Line:
    """Every row on one prompt, in rotating order. The answer that a second turn follows is the first row's, for all rows: they
    are asked the same."""
    answers = {row.name: Answers() for row in rows}
    lengths, cut = [], 0
    for sample in range(cell.question.samples):
        said: list[Said] = []
        for turn in range(len(one)):
            ids = cell.reader.ids(one, said)
            lengths.append(len(ids))
            cut += cell.reader.cuts(one, said)
            for row in rotated(rows, index + sample + turn):
                seed = cell.plan.seed + 1000 * index + sample
                found = measure(model, row, ids, index, cell.question.max_new_tokens, seed, cell.question.top_p)
                answers[row.name].measurements.append(found)
                answers[row.name].prompts.append(ids.tolist())
                answers[row.name].texts.append(cell.reader.text(found.tokens))
            said.append(("" if one.ids is not None else one.turns[turn], answers[rows[0].name].texts[-1]))
    _score(answers, one, cell)
    if not all(row.engine.lossless for row in rows):
        _weigh(model, answers)
    return {
        "kind": "prompt",
        **cell.key(),
        "index": index,
        "source": one.source,
        "category": cell.task.category(one.row),
        "digest": one.digest,
        "prompt_tokens": lengths,
        "cut": cut,
        "rows": {name: found.report() for name, found in answers.items()},
    }


def _weigh(model: PreTrainedModel, answers: dict[str, Answers]) -> None:
    """How likely the target finds every row's texts; the same text is asked for once."""
    known: dict[str, float] = {}
    for found in answers.values():
        total = 0.0
        for prompt, measured in zip(found.prompts, found.measurements, strict=True):
            key = digest([*prompt, -1, *measured.tokens])
            if key not in known:
                known[key] = log_likelihood(model, torch.tensor(prompt), measured.tokens)
            total += known[key]
        found.log_likelihood = total


def _score(answers: dict[str, Answers], one: Conversation, cell: Cell) -> None:
    """Scores of every sample's last turn. The same text is scored once: lossless rows all say the same."""
    score = cell.task.score
    if score is None or (score.executes and not cell.plan.allow_code_execution):
        return
    known: dict[str, dict[str, float]] = {}
    for found in answers.values():
        for text in found.texts[len(one) - 1 :: len(one)]:
            if text not in known:
                known[text] = score.of(one.row, untabbed(text) if cell.question.tabs else text)
            found.scores.append(known[text])
