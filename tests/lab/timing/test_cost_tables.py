"""A table of costs made by hand, and what follows from it by hand."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipstone.lab.timing.cost_tables import BatchCosts, CostCurve, CostTables

TABLE = BatchCosts(
    batch=1,
    context=100,
    plain=0.012,
    fixed=0.002,
    chain=0.001,
    scoring=CostCurve((1, 5, 9), (0.010, 0.014, 0.026)),
    layers=CostCurve((1, 9), (0.008, 0.016)),
    exits=CostCurve((1, 2, 4), (0.002, 0.003, 0.009)),
    attention=0.001,
    mlp=0.002,
    layer=0.0005,
    ranked=0.0025,
    context_slope=CostCurve((1, 9), (1e-5, 9e-5)),
    draft_models={"abc": 0.004},
)


def near(value: float) -> Any:
    return pytest.approx(value, rel=1e-12)


def test_a_curve_lies_on_lines_and_goes_on_beyond_its_end() -> None:
    curve = TABLE.scoring
    assert [curve(n) for n in (0, 1, 2, 3, 5, 7, 9, 13)] == near([0.010, 0.010, 0.011, 0.012, 0.014, 0.020, 0.026, 0.038])
    assert CostCurve((3,), (0.5,))(7) == 0.5


def test_what_falls_is_levelled_by_its_mean() -> None:
    assert CostCurve.fitted({4: 3.0, 1: 1.0, 2: 4.0, 3: 2.0, 5: 9.0}) == CostCurve((1, 2, 3, 4, 5), (1.0, 3.0, 3.0, 3.0, 9.0))
    assert CostCurve.fitted({1: 5.0, 2: 3.0, 3: 1.0}).values == (3.0, 3.0, 3.0)


def test_steps_by_hand() -> None:
    assert TABLE.depth == 4
    assert TABLE.score(5) == near(0.014)
    # half of the layers are behind five tokens: layers(5) = .012, of which .004 above those of one
    assert TABLE.score(5, exit_layer=2) == near(0.014 - 0.5 * 0.004)
    assert TABLE.score(5, context=300) == near(0.014 + 200 * 5e-5)
    assert TABLE.plain_step(context=0) == near(0.012 - 100 * 1e-5)
    assert TABLE.of_exit(3).draft_step == near(0.006)
    # of .009: two attentions, one MLP, both of one layer
    assert TABLE.of_skipping(2, 1, 1).draft_step == near(0.009 - 0.002 - 0.002 - 0.0005)
    assert TABLE.of_skipping(2, 1, 1, ranked=True).draft_step == near(0.0045 + 0.0025)
    assert TABLE.of_skipping(9, 9, 9).draft_step == near(0.002), "no less than one layer and the head"
    draft_model = TABLE.of_draft_model("abc")
    assert draft_model is not None
    assert draft_model.draft_step == 0.004
    assert TABLE.of_draft_model("xyz") is None


def test_costs_are_those_of_a_measured_batch_size() -> None:
    larger = replace(TABLE, batch=5)
    costs = CostTables((TABLE, larger))
    assert (costs.at(1), costs.at(5)) == (TABLE, larger)
    with pytest.raises(ValueError, match="batches of 1, 5, not for one of 2"):
        costs.at(2)


def test_what_cannot_be_seconds_and_other_curves_are_refused() -> None:
    for change, said in (
        ({"plain": 0.0}, "takes time"),
        ({"fixed": -1.0}, "at least 0"),
        ({"batch": 0}, "batch of at least 1"),
    ):
        with pytest.raises(ValueError, match=said):
            replace(TABLE, **change)
    for places, values in (
        ((), ()),
        ((1, 2), (1.0,)),
        ((2, 1), (1.0, 2.0)),
        ((1, 2), (2.0, 1.0)),
        ((1, 2), (1.0, float("inf"))),
    ):
        with pytest.raises(ValueError, match="rising places with values that are finite, at least 0 and never fall"):
            CostCurve(places, values)


SECONDS = st.floats(0, 10, allow_subnormal=False)
MEASURED = st.dictionaries(st.integers(0, 80), SECONDS, min_size=1, max_size=14)
PLACES = st.lists(st.floats(0, 120), min_size=2, max_size=20).map(sorted)


@settings(deadline=None)
@given(MEASURED, PLACES)
def test_more_never_costs_less(measured: dict[int, float], places: list[float]) -> None:
    curve = CostCurve.fitted(measured)
    found = [curve(place) for place in places]
    assert all(a <= b for a, b in pairwise(found))
