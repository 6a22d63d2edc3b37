"""`auto` and steps in which an engine compiles."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from skipstone import LayerSkip, PromptLookup
from skipstone.decoding.request import Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.auto.auto import Auto
from skipstone.policy.choose_drafter import PLAIN, PROBE
from tests.helpers.machine import llama, prompt, start

PREPARING = 50.0
"""Seconds that a pass with a compilation seems to take."""


def test_steps_in_which_the_engine_compiles_teach_no_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither plain steps nor lookups, drafts or replays. It compiles in all passes of several tokens, and in every fifth of
    one."""
    raw, path, count, late, now = llama(), tmp_path / "log.jsonl", [0], [0.0], time.perf_counter
    engine: Any = ModelRunner(raw).engine
    run = engine.run

    def passes(hidden: Tensor, *given: Any) -> Tensor:
        count[0] += 1
        if hidden.shape[1] > 1 or count[0] % 5 == 0:
            engine.preparations += 1
            late[0] += PREPARING
        return run(hidden, *given)

    monkeypatch.setattr(engine, "preparations", 0, raising=False)
    monkeypatch.setattr(engine, "run", passes)
    monkeypatch.setattr(time, "perf_counter", lambda: now() + late[0])
    method = Auto((PromptLookup(), LayerSkip(exit_layer=2)), use_profile=False, log=str(path))
    decoder = start(method, ModelRunner(raw), [Request(prompt(9), 200)])
    while decoder.stats.steps < 90:
        decoder.step()
    learned = decoder.session.drafter.learned  # type: ignore[attr-defined]
    costs = learned.policy.costs
    assert all(one < 1 for one in learned.plain_seconds)
    assert costs.plain.value < 1, "seconds"
    assert learned.policy.budget.remaining > -20
    assert costs.scoring_of("")(2) < 20, "plain steps"
    assert abs(learned.lookups.gain) < 20
    events = [json.loads(line) for line in path.read_text().splitlines()]
    taken = [(event["steps"][2][0], event["steps"][3]) for event in events if "steps" in event]
    drafted = [result["preparing"] for kind, results in taken if kind not in (PLAIN, PROBE) for result in results]
    assert len(drafted) > 1
    assert all(drafted)
    assert all(event["replay"][3] < 1 for event in events if "replay" in event), "seconds"
