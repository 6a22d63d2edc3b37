"""Drafters with a rule of their own, which are judged by what their steps come to."""

from __future__ import annotations

import pytest

from skipstone.control import control, learning
from skipstone.control.costs import Cost, Costs
from skipstone.control.state import Done, Drafter, State


def with_own_rule(tokens: float, time: float, steps: int = 3000) -> tuple[State, float]:
    """Where steps of "whole" commit so many tokens in so many plain steps. Returns the last state and tokens a plain step."""
    costs = Costs(plain=Cost(1.0, 1), wholes={"whole": Cost(2.0)})
    state = State(costs, {"whole": Drafter(own_rule=True)})
    done_tokens = done_time = 0.0
    for _ in range(steps):
        plan = control.decide(state)
        drafts = plan.kind == "whole"
        done = Done(tokens if drafts else 1.0, time if drafts else 1.0, verified=4 * drafts)
        state = learning.observe(state, plan, done)
        done_tokens, done_time = done_tokens + done.tokens, done_time + done.seconds
    return state, done_tokens / done_time


def test_a_drafter_with_its_own_rule_takes_over_where_its_steps_win() -> None:
    state, rate = with_own_rule(2.0, 1.5)
    assert state.current == "whole"
    assert rate > 1.3


@pytest.mark.parametrize("time", [1.05, 1.5, 8.0])
def test_one_that_loses_is_tried_for_next_to_nothing(time: float) -> None:
    state, rate = with_own_rule(1.0, time)
    assert state.current is None
    assert 0.985 < rate < 1, "it was tried"
