"""Beliefs about times."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipstone.control.costs import CLAMP, FIRST_SLOPE, GAIN, Cost, Costs, Line, Scoring, typical


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
    assert [scoring(n) for n in (1, 2, 4, 6, 7, 8)] == pytest.approx([1.0, 1.1, 1.3, 1.5, 1.5, 1.5], abs=1e-3)
    assert scoring(10) == pytest.approx(1.5 + 2 * scoring.line.step, abs=1e-3)
    assert Scoring()(11) == pytest.approx(1 + 10 * FIRST_SLOPE)
    assert scoring.observe(1, 7.0) == scoring


def test_what_a_few_numbers_of_tokens_take_tells_of_all_others() -> None:
    scoring = Scoring()
    for n in (5, 2, 12, 3, 8, 4) * 4:
        scoring = scoring.observe(n, 0.7 + 0.06 * (n - 1))  # an early exit's layers are computed by then
    for n in (2, 6, 10, 20):
        assert scoring(n) == pytest.approx(0.7 + 0.06 * (n - 1), abs=0.08)


def test_an_outlier_makes_no_wall() -> None:
    """Were the one slow pass of two tokens believed, longer ones would never be thought cheaper again, and none be tried."""
    scoring = Scoring()
    for n in (6, 3, 9, 4, 5) * 4:
        scoring = scoring.observe(n, 1.0 + 0.02 * (n - 1))
    once = scoring.observe(2, 3.0)
    assert once.surprised
    assert once(5) < 1.25
    for n in (6, 3, 9, 4, 5) * 2:
        once = once.observe(n, 1.0 + 0.02 * (n - 1))
    assert not once.surprised
    assert once(9) == pytest.approx(scoring(9), abs=0.03)


def test_a_step_that_passes_do_have_is_learnt() -> None:
    """Nine tokens and more take twice what eight take, on some machines."""
    scoring = Scoring()
    for n in (2, 8, 9, 5, 12, 8, 9, 3) * 12:
        scoring = scoring.observe(n, 1.0 if n <= 8 else 2.0)
    assert scoring(9) - scoring(8) > 0.6
    assert scoring(8) < 1.25


def learnt(times: list[tuple[int, float]], guess: Line) -> Line:
    for drafts, measured in times:
        guess = guess.observe(drafts, measured)
    return guess


@pytest.mark.parametrize(("setup", "step"), [(0.4, 0.1), (0.02, 0.25), (0.0, 0.6)])
def test_what_drafting_takes_is_told_apart_from_what_beginning_takes(setup: float, step: float) -> None:
    dice = random.Random(3)
    times = [(n, (setup + step * n) * dice.gauss(1, 0.05)) for n in (dice.randrange(1, 9) for _ in range(60))]
    found = learnt(times, Line(0.25))
    assert found.step == pytest.approx(step, abs=0.04)
    assert found.start == pytest.approx(setup, abs=0.1)
    assert found(6) == pytest.approx(setup + 6 * step, rel=0.1)


def test_short_drafts_alone_do_not_make_long_ones_dear() -> None:
    """Drafts of one token that take .5 are not five times .5 at five: some of it is setup."""
    found = learnt([(1, 0.5)] * 20, Line(0.25))
    assert found(1) == pytest.approx(0.5, rel=0.05)
    assert found(5) < 0.75 * 5 * 0.5


def test_two_surprises_in_drafting_are_damped_and_three_are_believed() -> None:
    known = learnt([(4, 1.0), (2, 0.6)] * 10, Line(0.2))
    once = known.observe(4, 9.0)
    assert once(4) < 1.2
    twice = once.observe(4, 9.0)
    assert twice(4) < 1.2
    assert twice.observe(4, 9.0)(4) == pytest.approx(9.0)
    assert once.observe(4, 1.0).surprises == 0


def test_of_what_was_measured_once_two_surprises_are_believed() -> None:
    """One measurement and a surprise are two that disagree, and no line that is known."""
    known = Line(0.2).observe(1, 0.3)
    once = known.observe(8, 9.0)
    assert once(8) < 4
    assert once.observe(8, 9.0)(8) == pytest.approx(9.0)


def test_what_is_typical_is_the_mean_without_what_a_stall_takes_more() -> None:
    assert typical([]) == 0
    assert typical([1.0, 1.4]) == pytest.approx(1.2)
    assert typical([1.0, 1.2, 1.1, 50.0]) == pytest.approx((1.0 + 1.2 + 1.1 + 1.5 * 1.1) / 4)


def test_a_first_time_of_drafting_far_above_its_guess_is_not_believed_alone() -> None:
    cold = Line(0.25).observe(2, 1.6)
    assert cold.surprises == 1
    assert cold.observe(2, 0.6)(2) == pytest.approx(0.6), "it was slow because it was the first"
    assert Line(0.25).observe(2, 0.3).surprises == 0, "what is faster than was thought is done again anyway"


@given(st.lists(st.tuples(st.integers(1, 25), st.floats(0.0, 30.0)), max_size=60))
def test_no_times_make_drafting_free_or_less(times: list[tuple[int, float]]) -> None:
    found = learnt(times, Line(0.3))
    assert found.step > 0
    assert found.start >= 0
    assert found(0) == 0 < found(1) < found(9) < math.inf


def test_what_a_step_takes_is_known_by_drafter() -> None:
    costs = Costs(Cost(0.01), drafts={"a": Line(0.2, 0.0, 1), "b": Line(0.3)}, wholes={"c": Cost(2.0)})
    assert costs.drafted("a", 2, 0.5).drafts["a"](2) > 0.4
    assert costs.drafted("a", 2, 0.5).drafts["b"].measurements == 0
    assert costs.stepped("c", 1.5).wholes["c"] == Cost(1.5, 1), "a guess gives way to the first measurement"


def test_what_is_but_guessed_was_guessed_as_wrongly_as_what_was_measured() -> None:
    costs = Costs(Cost(0.01), drafts={"a": Line(0.2), "b": Line(0.4), "c": Line(0.7, 0.0, 3)})
    for drafts in (1, 6, 3, 8) * 5:
        costs = costs.drafted("a", drafts, 0.5 + 0.05 * drafts)
    assert costs.drafts["b"].step == pytest.approx(0.1, abs=0.02)
    assert costs.drafts["b"].start == costs.drafts["a"].start == pytest.approx(0.5, abs=0.06)
    assert costs.drafts["c"] == Line(0.7, 0.0, 3)


def test_every_drafter_has_scoring_costs_of_its_own() -> None:
    costs = Costs(Cost(0.01), Scoring.of({4: 1.6}))
    after = costs
    for _ in range(6):
        after = after.scored("exit", 4, 1.2)
    assert after.scoring_of("exit")(4) == pytest.approx(1.2, abs=0.05)
    assert after.scoring_of("other")(4) == after.scoring(4) == pytest.approx(1.6, abs=1e-3)
    assert costs.scored(None, 4, 1.2).scoring_of("other")(4) < 1.6


@given(lengths=st.lists(st.integers(1, 32), min_size=1, max_size=40), factor=st.floats(0.6, 1.4))
def test_a_measurement_moves_a_line_towards_it_wherever_that_is(lengths: list[int], factor: float) -> None:
    """Also where the slope can fall no further: the start then gives way."""
    line = Line(0.02, 1.6, 1)
    for length in lengths:
        measured = factor * (1.0 + 0.01 * length)
        after = line.observe(length, measured)
        before = abs(line(length) - measured)
        assert before < 1e-4 or abs(after(length) - measured) < before
        line = after
