"""Beliefs about times."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipstone.control.costs import CLAMP, FIRST_SLOPE, GAIN, Cost, Costs, Drafting, Scoring


def test_one_surprise_is_damped_and_two_are_believed() -> None:
    cost = Cost(1.0, 100)
    once = cost.observe(10.0)
    assert once.value == pytest.approx(1 + GAIN * CLAMP)
    assert once.observe(8.0) == Cost(8.0, 1)
    assert once.observe(1.0).value < 1.1
    assert once.observe(1.0).surprises == 0


def test_small_differences_are_averaged() -> None:
    cost = Cost(1.0, 1)
    for turn in range(400):
        cost = cost.observe(1.3 if turn % 2 else 1.1)
    assert cost.value == pytest.approx(1.2, abs=0.02)


@given(st.dictionaries(st.integers(2, 64), st.floats(0.5, 9.0), max_size=8))
def test_scoring_never_falls(values: dict[int, float]) -> None:
    scoring = Scoring.of(values)
    found = [scoring(n) for n in range(1, 100)]
    assert found[0] == 1.0
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(found[min(values, default=2) - 1 :]))


def test_scoring_by_hand() -> None:
    scoring = Scoring.of({2: 1.1, 6: 1.5, 8: 1.4})
    assert [scoring(n) for n in (1, 2, 4, 6, 7, 8)] == pytest.approx([1.0, 1.1, 1.3, 1.5, 1.5, 1.5])
    assert scoring(10) == pytest.approx(1.5 + 2 * FIRST_SLOPE)
    assert Scoring()(11) == pytest.approx(1 + 10 * FIRST_SLOPE)
    assert scoring.observe(6, 1.7)(6) == pytest.approx(1.6), "the mean of the first two"
    assert scoring.observe(4, 9.0)(4) == pytest.approx(1.3 + CLAMP * 1.3 / 2), "what the line says counts as one"
    assert Scoring.of({3: 0.8})(2) == pytest.approx(0.9), "drafting may have done a part of the scoring"
    assert scoring.observe(1, 7.0) == scoring


def learnt(times: list[tuple[int, float]], guess: Drafting) -> Drafting:
    for drafts, measured in times:
        guess = guess.observe(drafts, measured)
    return guess


@pytest.mark.parametrize(("setup", "step"), [(0.4, 0.1), (0.02, 0.25), (0.0, 0.6)])
def test_what_drafting_takes_is_told_apart_from_what_beginning_takes(setup: float, step: float) -> None:
    dice = random.Random(3)
    times = [(n, (setup + step * n) * dice.gauss(1, 0.05)) for n in (dice.randrange(1, 9) for _ in range(60))]
    found = learnt(times, Drafting(0.25))
    assert found.step == pytest.approx(step, abs=0.04)
    assert found.setup == pytest.approx(setup, abs=0.1)
    assert found(6) == pytest.approx(setup + 6 * step, rel=0.1)


def test_short_drafts_alone_do_not_make_long_ones_dear() -> None:
    """Drafts of one token that take .5 are not five times .5 at five: some of it is setup."""
    found = learnt([(1, 0.5)] * 20, Drafting(0.25))
    assert found(1) == pytest.approx(0.5, rel=0.05)
    assert found(5) < 0.75 * 5 * 0.5


def test_a_single_surprise_in_drafting_is_damped_and_two_are_believed() -> None:
    known = learnt([(4, 1.0), (2, 0.6)] * 10, Drafting(0.2))
    once = known.observe(4, 9.0)
    assert once(4) < 1.2
    assert once.observe(4, 9.0)(4) == pytest.approx(9.0)
    assert once.observe(4, 1.0).surprises == 0


def test_a_first_time_of_drafting_far_above_its_guess_is_not_believed_alone() -> None:
    cold = Drafting(0.25).observe(2, 1.6)
    assert cold.surprises == 1
    assert cold.observe(2, 0.6)(2) == pytest.approx(0.6), "it was slow because it was the first"
    assert Drafting(0.25).observe(2, 0.3).surprises == 0, "what is faster than was thought is done again anyway"


@given(st.lists(st.tuples(st.integers(1, 25), st.floats(0.0, 30.0)), max_size=60))
def test_no_times_make_drafting_free_or_less(times: list[tuple[int, float]]) -> None:
    found = learnt(times, Drafting(0.3))
    assert found.step > 0
    assert found.setup >= 0
    assert found(0) == 0 < found(1) < found(9) < math.inf


def test_what_a_step_takes_is_known_by_drafter() -> None:
    costs = Costs(Cost(0.01), drafts={"a": Drafting(0.2, 0.0, 1), "b": Drafting(0.3)}, wholes={"c": Cost(2.0)})
    assert costs.drafted("a", 2, 0.5).drafts["a"](2) > 0.4
    assert costs.drafted("a", 2, 0.5).drafts["b"].measurements == 0
    assert costs.stepped("c", 1.5).wholes["c"] == Cost(1.5, 1), "a guess gives way to the first measurement"


def test_what_is_but_guessed_was_guessed_as_wrongly_as_what_was_measured() -> None:
    costs = Costs(Cost(0.01), drafts={"a": Drafting(0.2), "b": Drafting(0.4), "c": Drafting(0.7, 0.0, 3)})
    for drafts in (1, 6, 3, 8) * 5:
        costs = costs.drafted("a", drafts, 0.5 + 0.05 * drafts)
    assert costs.drafts["b"].step == pytest.approx(0.1, abs=0.02)
    assert costs.drafts["b"].setup == costs.drafts["a"].setup == pytest.approx(0.5, abs=0.06)
    assert costs.drafts["c"] == Drafting(0.7, 0.0, 3)


def test_every_drafter_has_scoring_costs_of_its_own() -> None:
    costs = Costs(Cost(0.01), Scoring.of({4: 1.6}))
    after = costs.scored("exit", 4, 1.2)
    assert after.scoring_of("exit")(4) == pytest.approx(1.4)
    assert after.scoring_of("other")(4) == after.scoring(4) == 1.6
    assert costs.scored(None, 4, 1.2).scoring_of("other")(4) == pytest.approx(1.4)
