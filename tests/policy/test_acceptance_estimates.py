"""Estimates of acceptance, on drafts with a known acceptance."""

import math
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipstone.policy.acceptance_estimates import MEMORY, ConfidenceAcceptance, MatchAcceptance, RankAcceptance
from skipstone.policy.draft_length import MAX_DRAFTS, RankTree


def acceptance(confidence: float, slope: float, offset: float) -> float:
    return 1 / (1 + math.exp(-slope * math.log(confidence / (1 - confidence)) - offset))


def teach(state: ConfidenceAcceptance, slope: float, offset: float, count: int, seed: int) -> ConfidenceAcceptance:
    """Drafts whose acceptance has this slope and offset."""
    dice = random.Random(seed)
    for _ in range(count):
        confidence = 1 / (1 + math.exp(-dice.gauss(1.0, 1.5)))
        state.observe([(confidence, dice.random() < acceptance(confidence, slope, offset))])
    return state


def error(state: ConfidenceAcceptance, slope: float, offset: float) -> float:
    """Mean difference of predicted and true acceptance."""
    places = [1 / (1 + math.exp(-(1.0 + 1.5 * z))) for z in (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5)]
    return sum(abs(state.predict(c) - acceptance(c, slope, offset)) for c in places) / len(places)


@pytest.mark.parametrize(("slope", "offset"), [(1.0, 0.0), (0.6, -0.8), (1.4, 0.5), (0.3, 1.0)])
def test_it_learns_what_a_confidence_means(slope: float, offset: float) -> None:
    after = sum(error(teach(ConfidenceAcceptance(), slope, offset, 400, seed), slope, offset) for seed in range(8)) / 8
    assert after < min(0.05, error(ConfidenceAcceptance(), slope, offset))


def test_it_follows_a_change() -> None:
    """The offset falls by 1. MEMORY drafts correct most of the error, three times as many nearly all."""
    for count, left in ((400, 0.6), (1200, 0.25)):
        states = [teach(ConfidenceAcceptance(), 1.0, 0.5, 600, seed) for seed in range(6)]
        before = sum(error(one, 1.0, -0.5) for one in states)
        after = sum(error(teach(one, 1.0, -0.5, count, seed + 100), 1.0, -0.5) for seed, one in enumerate(states))
        assert after < left * before
    states[0].observe([(0.5, True)] * 3000 + [(0.5, False)] * int(MEMORY))
    assert states[0].mean == pytest.approx(1 / math.e, abs=0.03)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60))
def test_it_stays_finite(seen: list[tuple[float, bool]]) -> None:
    state = ConfidenceAcceptance()
    for confidence, accepted in seen:
        state.observe([(confidence, accepted)])
        assert 0 < state.predict(confidence) < 1
        assert 0 <= state.mean <= 1
        assert min(state.slope_variance, state.offset_variance) > 0
        assert state.covariance**2 <= state.slope_variance * state.offset_variance * (1 + 1e-9)


def test_matches_count_by_length_and_place() -> None:
    """Matches of two tokens continue rightly for one token, those of twelve for all five that can be told."""
    state, fresh = MatchAcceptance(), MatchAcceptance()
    for _ in range(600):
        state.observe(2, right=1, compared=5)
        state.observe(12, right=5, compared=5)
    short, long = state.predict(2, MAX_DRAFTS), state.predict(12, MAX_DRAFTS)
    assert short[0] > 0.95
    assert short[1] < 0.05
    assert min(long[:5]) > 0.9
    unseen = fresh.predict(12, MAX_DRAFTS)
    assert long[6] / long[5] == pytest.approx(unseen[6] / unseen[5]), "of places that were never told nothing is known"
    assert state.predict(1, 3) == fresh.predict(1, 3)
    assert len(state.predict(2, 3)) == 3


def test_a_tree_decodes_pending_tokens_virtually() -> None:
    """The tree holds the paths 0, 00 and 1. A step commits the tokens on its path and one more."""
    state = RankAcceptance(tree=RankTree((-1, 0, -1), (0, 0, 1)))
    state.observe([0, 0, 7, 1, 9, 9, 0, 5, 0, 0, 0, 0, 0, 0, 0])
    assert state.decode_virtually() == [3, 2, 1, 2]  # 0 0 7 | 1 9 | 9 | 0 5; the last seven tokens wait
    assert len(state.pending) == 7


def test_a_tree_of_counted_ranks_is_seldom_built_anew_and_only_if_it_pays() -> None:
    state, flat = RankAcceptance(), [0.0, *[1.0] * 30]
    state.observe([0, 0, 1, 9] * 3000)
    state.build(16, 1.0, flat)
    assert [one / state.tokens for one in state.hits] == pytest.approx([0.5, 0.25, 0, 0, 0], abs=0.01)
    first: Any = state.tree
    assert set(first.ranks) == {0, 1}
    state.observe([9] * 900)
    state.build(100, 1.0, flat)
    assert state.tree == first
    state.build(500, 1.0, [0.0, 1.0, *[3.0] * 29])
    assert state.tree is None
