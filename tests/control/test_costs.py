"""Beliefs about times."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipstone.control.costs import CLAMP, FIRST_SLOPE, GAIN, Cost, Costs, Scoring


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


def test_a_draft_step_is_observed() -> None:
    costs = Costs(Cost(0.01), drafts={"a": Cost(0.2, 1), "b": Cost(0.3)}).drafted("a", 0.24)
    assert costs.drafts["a"].value == pytest.approx(0.22)
    assert costs.drafts["b"] == Cost(0.3)
    assert costs.drafted("b", 0.9).drafts["b"] == Cost(0.9, 1), "a guess gives way to the first measurement"


def test_every_drafter_has_scoring_costs_of_its_own() -> None:
    costs = Costs(Cost(0.01), Scoring.of({4: 1.6}))
    after = costs.scored("exit", 4, 1.2)
    assert after.scoring_of("exit")(4) == pytest.approx(1.4)
    assert after.scoring_of("other")(4) == after.scoring(4) == 1.6
    assert costs.scored(None, 4, 1.2).scoring_of("other")(4) == pytest.approx(1.4)
