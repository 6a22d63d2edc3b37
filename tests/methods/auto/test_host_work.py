"""When `auto` looks texts up, and how it counts such steps and those in which an engine compiles."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from skipstone import LayerSkip, PromptLookup, Recycle
from skipstone.decoding.loop import DecodingLoop
from skipstone.decoding.request import Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.auto.auto import Auto, AutoDrafter
from skipstone.methods.auto.learned import HostWork, Learned
from skipstone.policy.choose_drafter import COLD_STEPS, PLAIN, PLAIN_AT_ONCE, PROBE, WINDOW, Decision, Policy
from skipstone.policy.cost_model import LearnedCosts, MeanTime
from tests.helpers.machine import llama, prompt, running, start


def looked_up_in(steps: int, requests: int, paying: int = 0) -> list[int]:
    """Number of steps of every request that look their text up. paying: number of steps at first in which that pays."""
    work, step, found = HostWork(), 0, []
    for _ in range(requests):
        work.begin_text(step)
        count = 0
        for _ in range(steps):
            count += work.is_wanted(step, step < paying)
            step += 1
        found.append(count)
    return found


def test_texts_are_looked_up_now_and_then_and_new_ones_at_first() -> None:
    short = looked_up_in(64, 64)
    assert short[:4] == [64, 64, WINDOW, WINDOW], "128 steps, then new texts only"
    assert [place for place, count in enumerate(short) if count == 64] == [0, 1, 6, 7, 16, 17, 34, 35]
    assert looked_up_in(100, 3, paying=300) == [100, 100, 100]
    work = HostWork(until=0, rest=16 * PLAIN_AT_ONCE)
    assert work.is_wanted(5, pays=True)
    assert work.rest == HostWork().rest, "what paid once is looked up again soon"
    for gain in (0.0, 3.0):
        for _ in range(200):
            work.observe(gain, 0.05)
        assert (work.gain > work.spent) == (gain > 0)


def looking() -> Any:
    """In the midst of a text, with lookups and recycled tokens."""
    decoder, _ = running(llama(), Auto((PromptLookup(), Recycle())), new=100, steps=20)
    drafter: Any = decoder.session.drafter
    drafter._settle()
    return drafter


def test_steps_that_run_prompts_keep_no_continuations_because_nothing_charges_their_time() -> None:
    decoder = DecodingLoop(Auto((PromptLookup(), Recycle())).start(ModelRunner(llama()), 2, 64), decodes_during_prefill=True)
    drafter: Any = decoder.session.drafter
    decoder.admit(0, Request(prompt(5), 40))
    for _ in range(4):
        decoder.step()
    calls: list[str] = []
    drafter.recycle.observe_scores = lambda *_: calls.append("kept")
    drafter._looks_up = drafter._keeps = True  # as the latest decoding step may leave it
    decoder.admit(1, Request(prompt(7, 1), 40))
    step = decoder.step()
    assert step.prefill
    assert step.tokens[1]
    assert not calls


def test_only_warm_plain_steps_are_timed() -> None:
    drafter = looking()
    drafter._looks_up, drafter._keeps, drafter._ran_prompt, drafter._plain_in_a_row = False, False, False, 0
    for seconds in (1.3, 1.1, 9.0, 1.0, 1.2):
        drafter._add_plain(1.0, seconds)
    (result,) = drafter._results
    assert (result.tokens, result.steps) == (5.0, 5)
    assert result.seconds == pytest.approx(13.6, abs=2.4), "the first two count as one and a half plain steps at most"
    drafter._settle()
    assert list(drafter.learned.plain_seconds)[-3:] == [9.0, 1.0, 1.2]
    assert result.warm_steps == 3
    assert result.warm_seconds == pytest.approx((1.0 + 1.2 + 2 * 1.2) / 3), "a stall counts twice the median"


@pytest.mark.parametrize(("before", "behind_prompt"), [(COLD_STEPS, False), (0, True)])
def test_a_plain_step_that_looks_up_counts_as_a_plain_one_and_the_looking(before: int, behind_prompt: bool) -> None:
    """If it finds the caches of a plain step."""
    drafter = looking()
    plain = drafter.learned.policy.costs.plain.value
    drafter._decision, drafter._looks_up, drafter._keeps = Decision(PLAIN), True, False
    drafter._plain_in_a_row, drafter._ran_prompt, drafter._host_seconds = before, behind_prompt, plain / 10
    drafter._add_plain(1.0, 9 * plain)
    (result,) = drafter._results
    assert (result.steps, drafter._warm, result.seconds) == (1, [], pytest.approx(1.1 * plain))


@pytest.mark.parametrize(
    ("seconds", "interval"),
    [([float(second) for second in range(64)], (24.0, 39.0)), ([32.0, 30.0], (30.0, 32.0)), ([], (31.0, 31.0))],
)
def test_the_interval_of_a_plain_step_holds_the_median(seconds: list[float], interval: tuple[float, float]) -> None:
    """For 64 values the chance that fewer than 24 lie below the median, or above it, is .033 (binomial distribution)."""
    learned = Learned({1: Policy(LearnedCosts(MeanTime(31.0, 3)), {})})
    learned.plain_seconds.extend(seconds)
    assert learned.report()["plain_interval"] == interval


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
    monkeypatch.setattr(AutoDrafter, "setup_seconds", lambda *_: 0.0)  # it lasts many of these short steps
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
