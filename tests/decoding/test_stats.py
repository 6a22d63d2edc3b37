"""Figures by hand: where tokens come from, Stats as a fold over Steps, and what plain decoding would have cost."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from skipstone import Autoregressive, Draft, Method, Request, Sampling, Stats, Step
from skipstone.decoding.drafter import Drafter
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.model_runner import ModelRunner
from tests.helpers.machine import decode, llama, prompt


@dataclass(frozen=True)
class Scripted(Method):
    """Proposes the chains it is given, step by step, to row 0."""

    name: ClassVar[str] = "scripted"

    chains: tuple[tuple[int, ...], ...] = ()

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return ScriptedDrafter(self)


class ScriptedDrafter(Drafter):
    def __init__(self, method: Scripted) -> None:
        self.chains = deque(method.chains)

    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        view = self.view
        chain = self.chains.popleft() if self.chains else ()
        forward = view.start_forward([len(chain)] * view.rows)
        if not chain:
            return Draft.empty(view.rows, view.root.device, forward)
        tokens = torch.tensor([chain])
        forward.append(tokens)
        return Draft(tokens, torch.ones_like(tokens, dtype=torch.bool), forward, draft_steps=torch.tensor([len(chain) + 1]))


def test_origins_and_figures_of_a_trace_made_by_hand() -> None:
    """Right drafts of 3 of 4; both of 2; none of 1; no draft; then an end token inside a chain of 3."""
    model = ModelRunner(llama())
    asked = Request(prompt(6, 2), 14, sampling=Sampling(1.0, seed=4))
    text = decode(Autoregressive(), model, [asked])[0][0]
    wrong = next(token for token in range(97) if token not in text)
    chains = ((text[1], text[2], text[3], wrong), (text[5], text[6]), (wrong,), (), (text[10], text[11], text[12]))
    ending = replace(asked, eos=frozenset({text[11]} - set(text[:11])))
    assert ending.eos, "the end token occurs first where the trace ends"
    found, figures, steps = decode(Scripted(chains), model, [ending], check=True)
    assert found == [text[:12]]
    assert [step.tokens[0] for step in steps] == [text[:1], text[1:5], text[5:8], text[8:9], text[9:10], text[10:12]]
    assert [step.origin[0] for step in steps] == [
        ["prefill"],
        ["draft", "draft", "draft", "recovered"],
        ["draft", "draft", "bonus"],
        ["recovered"],
        ["bonus"],
        ["draft", "draft"],
    ]
    assert [step.drafted[0] for step in steps] == [step.verified_nodes for step in steps] == [0, 4, 2, 1, 0, 3]
    assert [step.accepted[0] for step in steps] == [0, 3, 2, 0, 0, 2]
    assert [step.finished for step in steps] == [[], [], [], [], [], [0]]
    assert (figures.prefill_tokens, figures.tokens, figures.steps, figures.turns) == (1, 11, 5, 5)
    assert (figures.drafted, figures.draft_steps, figures.accepted, figures.verified_nodes) == (10, 5 + 3 + 2 + 0 + 4, 7, 10)
    assert figures.acceptance_rate == 7 / 14
    assert figures.mean_acceptance_length == 1 + 7 / 5
    assert dict(figures.histogram) == {3: 1, 2: 2, 0: 2}


def stepped(**given: Any) -> Step:
    """A step of two rows, of which the second may have ended."""
    base: dict[str, Any] = {
        "tokens": [[1, 2, 3], [4]],
        "origin": [["draft", "draft", "recovered"], ["recovered"]],
        "drafted": [4, 4],
        "draft_steps": [4, 4],
        "accepted": [2, 0],
        "overruled": [1, 0],
        "verified_nodes": 8,
        "seconds_draft": 0.4,
        "seconds_score": 0.5,
        "seconds_other": 0.1,
    }
    return Step(**{**base, **given})


def test_stats_are_a_fold_over_steps_pooled_not_averaged() -> None:
    stats, none = Stats(), {"drafted": [0, 0], "draft_steps": [0, 0], "accepted": [0, 0]}
    stats.add(stepped(prefill=True, tokens=[[9], [9]], **none))
    stats.add(stepped())
    stats.add(stepped(tokens=[[1, 2, 3, 4, 5], []], accepted=[4, 0], drafted=[4, 0], draft_steps=[4, 0], verified_nodes=4))
    stats.add(stepped(probe=True, tokens=[[7], []], verified_nodes=0, **none))
    assert (stats.prefill_tokens, stats.tokens, stats.turns, stats.steps, stats.probes) == (2, 10, 2, 3, 1)
    assert (stats.acceptance_rate, stats.mean_acceptance_length) == (6 / 12, 1 + 6 / 3)
    assert dict(stats.histogram) == {2: 1, 0: 1, 4: 1}
    assert (stats.overruled, stats.verified_nodes) == (2, 12)
    assert (stats.seconds, stats.seconds_prefill) == (pytest.approx(3.0), pytest.approx(1.0))
    assert stats.tokens_per_second == pytest.approx(12 / 4)
    summary = json.loads(json.dumps(stats.summary()))
    assert (summary["new_tokens"], summary["acceptance_histogram"]) == (12, {"0": 1, "2": 1, "4": 1})
    assert (Stats().acceptance_rate, Stats().mean_acceptance_length, Stats().tokens_per_second) == (0, 1, 0)


def test_the_bound_of_the_speed_up_by_hand() -> None:
    """A step of 1.0 s: four draft passes .4, scoring .5, other .1. Plain decoding costs at most .1 + .5 a token."""
    stats, probe = Stats(), {"probe": True, "seconds_draft": 0.0, "seconds_score": 0.35, "seconds_other": 0.05}
    assert stats.speed_up_bound is None
    for count, drafts, more in ((3, 4, {}), (1, 4, {}), (1, 0, probe)):
        one = {"tokens": [[1] * count], "drafted": [drafts], "draft_steps": [drafts], "accepted": [count - 1]}
        stats.add(stepped(origin=[[]], overruled=[0], **one, **more))
    assert stats.speed_up_bound == pytest.approx(2 * 0.6 / 1.0)
