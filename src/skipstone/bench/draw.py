"""Which of a task's prompts are asked: to choose settings on, and to report."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from skipstone.bench.plan import Plan, Question, chooses
from skipstone.tasks.dialogue import Conversation, digest
from skipstone.tasks.task import Row, Task, prompt_of, tabbed

USUAL_PROMPTS = 20

Both = tuple[list[Conversation], list[Conversation]]
"""To choose settings on, and to report."""


def conversations(task: Task, question: Question, plan: Plan, data: Path | None) -> Both:
    """(to choose settings on, to report), drawn by the seed; none is in both, and every category of a task gives as many as
    any, while it has them. ValueError where there are too few."""
    rows, shown = task.rows(data), task.examples(question.shots, data)
    places = drawn([task.category(row) for row in rows], plan.seed)
    spare = plan.tune_prompts if chooses(plan) else 0
    usual = len(rows) - spare if question.protocol else min(USUAL_PROMPTS, len(rows) - spare)
    wanted = usual if question.num_prompts is None else question.num_prompts
    tuned = min(spare, max(0, len(rows) - wanted))
    if wanted > len(rows):
        raise ValueError(f"task {task.name} has {len(rows)} prompts, {wanted} are asked for")
    if spare and (wanted < 1 or not tuned):
        raise ValueError(
            f"settings are to be chosen on prompts that are not reported, and {task.name} has {len(rows)} in all: lower "
            "num_prompts or tune_prompts, or say which settings to take"
        )
    report, rest = sorted(places[:wanted]), places[wanted : wanted + tuned]

    def made(place: int) -> Conversation:
        return _conversation(task, question, place, rows[place], shown)

    return [made(place) for place in rest], [made(place) for place in report]


def drawn(categories: Sequence[str | None], seed: int) -> list[int]:
    """All places in a random order that takes turns between categories."""
    places = list(range(len(categories)))
    random.Random(seed).shuffle(places)
    piles: dict[str | None, list[int]] = {}
    for place in places:
        piles.setdefault(categories[place], []).append(place)
    return [place for turn in zip_longest(*piles.values()) for place in turn if place is not None]


def _conversation(task: Task, question: Question, place: int, row: Row, shown: Sequence[Row]) -> Conversation:
    turns = prompt_of(task, row, shown)
    return Conversation(f"{task.name} {place}", tuple(map(tabbed, turns) if question.tabs else turns), row=row)


def fingerprint(both: Both) -> str:
    """A hash of all that is asked, to tell whether a run that goes on asks the same."""
    return digest([ord(letter) for part in both for one in part for letter in one.digest])
