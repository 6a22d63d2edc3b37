"""What AdaDecode learns of its exits while it decodes: which tests pay, when to be surer, and what none of it may move."""

from __future__ import annotations

from typing import Any

import skipstone
from skipstone import AdaDecode
from skipstone.decoding.draft import RowVerdict
from skipstone.methods.adadecode import state as exit_state
from skipstone.methods.adadecode.state import ExitState
from skipstone.models.layered import LayeredModel
from tests.helpers.machine import llama, prompt


def verdict(accepted: int, drafted: int) -> RowVerdict:
    final = "bonus" if accepted == drafted else "recovered"
    return RowVerdict(list(range(accepted)), [0] * (accepted + 1), final, drafted, 0, drafted, drafted)


def state_of(**settings: Any) -> ExitState:
    layered = LayeredModel(llama(layers=8))
    method = AdaDecode("original", exit_layers=(2, 4), **settings)
    return ExitState(layered, method.heads_for(layered), method.exit_layers, method.threshold, method.guard)


def test_the_threshold_rises_where_early_predictions_do_not_pay() -> None:
    """All rejected: each step of one prediction costs a quarter more than it brings."""
    state = state_of()
    lost = plain = 0.0
    for _ in range(2000):
        if state.most_drafts(5):
            state.record([[2]], [verdict(0, 1)], [(0, 2, 1), (0, 8, 2)], 0.0125)
            lost += 0.25
        else:
            state.record([[]], [verdict(0, 0)], [(0, 8, 1)], 0.01)
        plain += 1
    found = state.report()
    assert found["threshold"] > 0.95
    assert found["raised"] >= 5
    assert found["exits"]["2"]["rejected"] == found["drafted_steps"] < 400
    assert lost < 0.05 * plain
    said = state.remark()
    assert said is not None
    assert "threshold rose from 0.75 to" in said


def test_the_threshold_stays_where_no_prediction_is_wrong() -> None:
    """What is slow for other reasons is decoded plainly; surer heads would not mend it."""
    state = state_of()
    plain = 0
    for _ in range(1000):
        if state.most_drafts(5):
            state.record([[2]], [verdict(1, 1)], [(0, 2, 1), (0, 8, 2)], 0.03)
        else:
            state.record([[]], [verdict(0, 0)], [(0, 8, 1)], 0.01)
            plain += 1
    assert state.threshold == 0.75
    assert plain > 800
    assert state.report()["pays"] is False


def clock_plain_steps(state: exit_state.ExitState) -> None:
    for _ in range(3):
        state.payoff.clock(1.0, 0.01, drafted=False)


def test_an_exit_that_is_left_out_gives_the_others_a_new_start() -> None:
    """Before, the useless tests at layer 2 spoil what layer 4 brings."""
    state = state_of()
    clock_plain_steps(state)
    state.stop_seconds = 1e-3
    for step in range(exit_state.LEAST_TESTS):
        state.record([[4]], [verdict(1, 1)], [(0, 2, 1), (2, 4, 1), (0, 8, 2)], 0.05)
        state.tested(2, [False])
        state.tested(4, [True])
        if step < exit_state.LEAST_TESTS - 1:
            assert state.payoff.speedup_steps
    state.record([[4]], [verdict(1, 1)], [(0, 2, 1), (2, 4, 1), (0, 8, 2)], 0.05)
    assert not state.payoff.speedup_steps
    assert state._rejected == 0
    assert state.report()["tested"] == [4]
    state.record([[4]], [verdict(1, 1)], [(0, 4, 1), (0, 8, 2)], 0.01)
    assert len(state.payoff.speedup_steps) == 1, "once"


def test_an_exit_whose_predictions_are_too_often_wrong_is_left_out() -> None:
    """Sure in half of its tests: what is right saves up to 2 of 8 layers, what is wrong lets the next token run 4 in vain."""
    for right, kept in ((0.9, [2, 4]), (0.6, [4])):
        state = state_of()
        clock_plain_steps(state)
        state.stop_seconds = 1e-5
        for number in range(100):
            state.tested(2, [number % 2 == 0])
            state.tested(4, [True])
            state.record([[2]], [verdict(int(number % 10 < 10 * right), 1)], [], None)
        assert state.report()["tested"] == kept


def test_a_guard_that_is_off_learns_and_changes_nothing() -> None:
    state = state_of(guard=False)
    for _ in range(200):
        assert state.most_drafts(5) == 5
        assert state.worth_testing() == state.exits
        state.record([[2]], [verdict(0, 1)], [(0, 2, 1), (0, 8, 2)], None)
    assert state.threshold == 0.75
    assert state.remark() is None


def test_exits_that_hardly_ever_predict_are_hardly_ever_tested() -> None:
    state = state_of()
    assert state.stop_seconds >= state.test_seconds > 0
    state.stop_seconds = 1e-4
    clock_plain_steps(state)
    asked = {2: 0, 4: 0}
    for _ in range(exit_state.LEAST_TESTS + 640):
        for _, layer in state.worth_testing():
            asked[layer] += 1
            state.tested(layer, [layer == 4])
    assert asked[4] == exit_state.LEAST_TESTS + 640
    assert asked[2] == exit_state.LEAST_TESTS + 640 // exit_state.EXPLORE
    reports = [state.report()["tested"] for _ in range(2 * exit_state.EXPLORE)]
    assert reports == [[4]] * len(reports), "whoever looks changes nothing"


def test_a_prediction_behind_a_rejected_one_is_neither_right_nor_wrong() -> None:
    state = state_of()
    state.record([[2, 4, 2, 4]], [verdict(1, 4)], [], None)
    tallies = state.report()["exits"]
    assert (tallies["2"]["accepted"], tallies["2"]["rejected"]) == (1, 0)
    assert (tallies["4"]["accepted"], tallies["4"]["rejected"]) == (0, 1)


def test_what_was_learnt_changes_no_sampled_text() -> None:
    """The standard rule's text depends on where predictions were made: nothing that other requests have taught may move it."""
    model = llama(layers=6)
    method = AdaDecode("original", 0.3, exit_layers=(2, 4))
    wish: dict[str, Any] = {"max_new_tokens": 40, "do_sample": True, "seed": 5}
    first = skipstone.generate(model, prompt(9), method, **wish).new_tokens
    layered = LayeredModel(model)
    state = method._state(layered, 1)
    state.threshold = 1.0
    for tally in state.tallies.values():
        tally.tests, tally.rate = 1000, 0.0
    again = skipstone.generate(model, prompt(9), method, **wish)
    assert again.new_tokens == first
    assert again.stats is not None
    assert again.stats.drafted > 0
    greedy = skipstone.generate(model, prompt(9), method, max_new_tokens=40, do_sample=False)
    assert greedy.stats is not None
    assert greedy.stats.drafted == 0
