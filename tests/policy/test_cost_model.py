"""What steps take, and the speed-up."""

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipstone.policy.cost_model import (
    FIRST_SLOPE,
    HOST,
    LearnedCosts,
    LineTime,
    MeanTime,
    ScoringTime,
    StepCosts,
    expected_tokens,
    typical,
)


def test_the_speedup_by_hand() -> None:
    """Three draft steps of .2 and a pass over four tokens of 1.1 bring 1 + .8 + .64 + .512 tokens."""
    costs = StepCosts(plain=1.0, draft_step=0.2, scoring=lambda n: 1 + (n - 1) / 30, start=0.05, fixed=0.05)
    tokens = expected_tokens(0.8, 3)
    assert costs.step(3) == pytest.approx(0.05 + 0.6 + 1.1 + 0.05)
    assert costs.speedup(tokens, 3) == pytest.approx(2.952 / 1.8)
    assert costs.step(3, scored=7) == pytest.approx(0.05 + 0.6 + 1.2 + 0.05)
    assert costs.step(0) == pytest.approx(1.0 + 0.05), "what starting a chain takes is no part of it"


@given(st.floats(0.05, 0.95), st.floats(0.01, 1.0), st.integers(1, 8))
def test_the_speedup_is_that_of_a_long_run(acceptance: float, step: float, drafts: int) -> None:
    """Enumerated: with so many drafts, i are accepted with probability a^i (1 - a), and all with a^k."""
    costs = StepCosts(1.0, step, lambda n: 1.0)
    chances = [acceptance**i * (1 - acceptance) for i in range(drafts)] + [acceptance**drafts]
    tokens = sum(chance * (accepted + 1) for accepted, chance in enumerate(chances))
    assert costs.speedup(expected_tokens(acceptance, drafts), drafts) == pytest.approx(tokens / (drafts * step + 1))
    assert expected_tokens(1.0, drafts) == pytest.approx(drafts + 1, rel=1e-6)


def test_an_outlier_counts_little_in_a_mean_time() -> None:
    assert typical([]) == 0
    assert typical([1.0, 1.4]) == pytest.approx(1.2)
    assert typical([1.0, 1.2, 1.1, 50.0]) == pytest.approx((1.0 + 1.2 + 1.1 + 2 * 1.1) / 4)
    guess = MeanTime(9.0)
    guess.observe(2.0)
    guess.observe(3.0)
    assert guess.value == pytest.approx(2.5), "the first measurement replaces a guess"
    for turn in range(400):
        guess.observe(1.3 if turn % 2 else 1.1)
    assert guess.value == pytest.approx(1.2, abs=0.05)
    guess.observe(50.0)
    assert guess.value < 1.6


@pytest.mark.parametrize(("start", "step"), [(0.4, 0.1), (0.02, 0.25), (0.0, 0.6)])
def test_starting_a_chain_is_told_apart_from_its_steps(start: float, step: float) -> None:
    dice, line = random.Random(3), LineTime(0.1, 0.25)
    for _ in range(60):
        n = dice.randrange(1, 9)
        line.observe(n, (start + step * n) * dice.gauss(1, 0.05))
    assert line.step == pytest.approx(step, abs=0.04)
    assert line.start == pytest.approx(start, abs=0.1)
    assert line(6) == pytest.approx(start + 6 * step, rel=0.1)


def test_a_first_time_far_from_a_guess_replaces_it_and_later_outliers_are_damped() -> None:
    far, near, line = LineTime(0.1, 0.25), LineTime(0.1, 0.25), LineTime(0.1, 0.2)
    far.observe(2, 1.8)
    near.observe(2, 0.7)
    assert (far(2), far(4)) == (pytest.approx(1.8), pytest.approx(3 * (0.1 + 4 * 0.25)))
    assert 0.6 < near(2) <= 0.7
    for n in (4, 2) * 10:
        line.observe(n, 0.2 + 0.2 * n)
    line.observe(4, 9.0)
    assert line(4) == pytest.approx(1.0, rel=0.05)
    line.measurements = 0
    line.observe(4, 3.0)
    assert line(4) == pytest.approx(3.0)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 30.0)), max_size=50))
def test_no_times_make_drafting_free_or_scoring_fall(times: list[tuple[int, float]]) -> None:
    line, scoring = LineTime(0.1, 0.3), ScoringTime()
    for n, time in times:
        line.observe(n, time)
        scoring.observe(n + 1, max(time, 0.3))
    assert line.step > 0
    assert line.start >= 0
    assert 0 < line(1) < line(9) < math.inf
    found = [scoring(n) for n in range(2, 100)]
    assert scoring(1) == 1.0
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(found))


def test_some_numbers_of_tokens_tell_of_all_others() -> None:
    scoring = ScoringTime()
    for n in (5, 2, 12, 3, 8, 4) * 4:
        scoring.observe(n, 0.7 + 0.06 * (n - 1))  # an early exit has run a part of the layers
    for n in (2, 6, 10, 20):
        assert scoring(n) == pytest.approx(0.7 + 0.06 * (n - 1), abs=0.08)
    assert ScoringTime()(11) == pytest.approx(1 + 10 * FIRST_SLOPE)
    assert (scoring(2.5) - scoring(2)) == pytest.approx((scoring(3) - scoring(2)) / 2)
    before = scoring(5)
    scoring.observe(2, 3.0)
    assert scoring(5) < before + 0.3, "an outlier makes no step"
    for n in (6, 3, 9, 4, 5) * 2:
        scoring.observe(n, 0.7 + 0.06 * (n - 1))
    assert scoring(5) == pytest.approx(before, abs=0.03)
    assert (ScoringTime().max_drafts, scoring.max_drafts) == (8, 24), "twice the longest scored draft"


def test_a_step_in_the_times_of_passes_is_learnt() -> None:
    scoring = ScoringTime()
    for n in (2, 8, 9, 5, 12, 8, 9, 3) * 12:
        scoring.observe(n, 1.0 if n <= 8 else 2.0)
    assert scoring(9) - scoring(8) > 0.6
    assert scoring(8) < 1.3


def test_each_drafter_has_scoring_costs_of_its_own_and_guesses_are_taken_from_others() -> None:
    costs = LearnedCosts(MeanTime(0.01, 3), drafting={"a": LineTime(0.1, 0.2), "b": LineTime(0.1, 0.4)})
    for seconds in (1.5, 1.2):
        for _ in range(6):
            costs.observe_scoring("a", 4, seconds)
        assert costs.scoring_of("b")(4) == costs.scoring_of(HOST)(4) == pytest.approx(1.5, abs=0.05)
        assert costs.scoring_of("a")(4) < seconds + 0.2
        costs.timed_at[HOST] = 0
    assert costs.of("b").step(2) == pytest.approx(0.1 + 2 * 0.4 + costs.scoring_of("b")(3))
