"""Every pair of a covering array's factors meets, and there are few cells."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.helpers.pairwise import covering, crossed, in_turn


@pytest.mark.parametrize(
    ("sizes", "most"), [((2, 2, 2, 3), 7), ((2, 2, 2, 2, 2), 8), ((4, 3), 12), ((3, 3, 3, 3), 11), ((5,), 5)]
)
def test_every_pair_meets_in_few_cells(sizes: tuple[int, ...], most: int) -> None:
    cells = covering(sizes)
    for (one, m), (other, n) in combinations(enumerate(sizes), 2):
        assert {(cell[one], cell[other]) for cell in cells} == set(product(range(m), range(n)))
    assert len(cells) <= most
    assert cells == covering(sizes), "the same in every worker"


def test_the_rest_of_a_product_is_slow() -> None:
    values = crossed(a=[1, 2], b=["x", pytest.param("y", marks=pytest.mark.slow)], c=[0.5, None]).args[1]
    assert [(one.values, one.id, [mark.name for mark in one.marks]) for one in values if one.values[0] == 1] == [
        ((1, "x", 0.5), "1-x-0.5", []),
        ((1, "x", None), "1-x-None", []),
        ((1, "y", 0.5), "1-y-0.5", ["slow"]),
        ((1, "y", None), "1-y-None", ["slow"]),
    ]


def test_of_a_product_in_turn_every_first_value_has_one_fast_cell_and_the_others_all_occur() -> None:
    values = in_turn(a=range(5), b=["x", pytest.param("y", marks=pytest.mark.slow), "z"], c=[True, False]).args[1]
    assert [one.values for one in values] == list(product(range(5), "xyz", [True, False]))
    fast = [one.values for one in values if not one.marks]
    assert fast == [(0, "x", True), (1, "x", False), (2, "z", True), (3, "z", False), (4, "x", True)]
    assert all([mark.name for mark in one.marks] == ["slow"] for one in values if one.values not in fast)
