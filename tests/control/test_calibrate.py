"""What is learnt from judged drafts: synthetic confidences whose acceptance is known."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipstone.control.calibrate import MATCHES, PLACES, Logistic, Matches


def acceptance(confidence: float, slope: float, offset: float) -> float:
    return 1 / (1 + math.exp(-slope * math.log(confidence / (1 - confidence)) - offset))


def taught(slope: float, offset: float, count: int, seed: int, state: Logistic | None = None) -> Logistic:
    """A state that saw so many drafts whose acceptance has this slope and offset."""
    dice, state = random.Random(seed), state or Logistic()
    for _ in range(count):
        confidence = 1 / (1 + math.exp(-dice.gauss(1.0, 1.5)))
        state = state.observe(confidence, float(dice.random() < acceptance(confidence, slope, offset)))
    return state


def error(state: Logistic, slope: float, offset: float) -> float:
    """Mean difference of predicted and true acceptance over the confidences that it saw."""
    places = [1 / (1 + math.exp(-(1.0 + 1.5 * z))) for z in (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)]
    return sum(abs(state.predict(c) - acceptance(c, slope, offset)) for c in places) / len(places)


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.6, -0.8), (1.4, 0.5), (0.3, 1.0)])
def test_it_learns_what_a_confidence_means(slope: float, offset: float) -> None:
    before = error(Logistic(), slope, offset)
    after = sum(error(taught(slope, offset, 400, seed), slope, offset) for seed in range(8)) / 8
    assert after < 0.05
    assert after < before


def test_it_follows_a_change() -> None:
    """The offset falls by 1: as many drafts later as the memory is long most of the error is gone, and after three times as
    many all but what chance makes."""
    for count, left in ((400, 0.6), (1200, 0.25)):
        before = [taught(1.0, 0.5, 600, seed) for seed in range(6)]
        after = [taught(1.0, -0.5, count, seed + 100, old) for seed, old in enumerate(before)]
        assert sum(error(one, 1.0, -0.5) for one in after) < left * sum(error(one, 1.0, -0.5) for one in before)


def test_the_mean_is_that_of_the_latest_drafts() -> None:
    state = Logistic()
    for _ in range(3000):
        state = state.observe(0.5, 1.0)
    for _ in range(400):
        state = state.observe(0.5, 0.0)
    assert 0.3 < state.mean < 0.45  # 1/e is what a memory of 400 leaves


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=60))
def test_it_stays_finite(seen: list[tuple[float, float]]) -> None:
    state = Logistic()
    for confidence, accepted in seen:
        state = state.observe(confidence, accepted)
        assert 0 < state.predict(confidence) < 1
        assert 0 <= state.mean <= 1
        assert min(state.variances) > 0
        assert state.covariance**2 <= state.variances[0] * state.variances[1]


def test_what_a_surer_drafter_says_is_likelier() -> None:
    state = taught(1.0, 0.0, 200, 3)
    assert state.predict(0.1) < state.predict(0.5) < state.predict(0.9)


def test_matches_count_by_length_and_place() -> None:
    """Matches of two tokens go on rightly for exactly one token, those of twelve for all five that were looked up."""
    state = Matches()
    for _ in range(400):
        state = state.observe(2, right=1, looked_up=5).observe(12, right=5, looked_up=5)
    short, long = state.predict(2), state.predict(12)
    assert short[0] > 0.95
    assert short[1] < 0.05
    assert short[2:] == Matches().predict(2)[2:], "of what was never reached nothing is known"
    assert min(long[:5]) > 0.95
    assert long[5:] == Matches().predict(12)[5:]
    assert state.predict(3) == Matches().predict(3)
    assert len(short) == PLACES


def test_the_buckets_of_matches() -> None:
    distinct = {tuple(Matches().predict(length)) for length in range(1, 40)}
    assert len(distinct) == len(MATCHES)
    assert Matches().predict(4) == Matches().predict(5) != Matches().predict(6)
    with pytest.raises(ValueError, match="found 0"):
        Matches().predict(0)
