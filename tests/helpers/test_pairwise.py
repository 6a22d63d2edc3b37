"""Every pair of a covering array's factors meets, and there are few cells."""

from itertools import combinations, product
from typing import Any

import pytest

from tests.helpers.pairwise import covering_array, pairwise, round_robin, slow_except


@pytest.mark.parametrize(("sizes", "most"), [((2, 2, 2, 3), 7), ((2, 2, 2, 2, 2), 8), ((3, 3, 3, 3), 11)])
def test_every_pair_meets_in_few_cells(sizes: tuple[int, ...], most: int) -> None:
    cells = covering_array(sizes)
    for (one, m), (other, n) in combinations(enumerate(sizes), 2):
        assert {(cell[one], cell[other]) for cell in cells} == set(product(range(m), range(n)))
    assert len(cells) <= most
    assert cells == covering_array(sizes), "the same in every worker"


def levels(params: list[Any]) -> dict[tuple[Any, ...], list[str]]:
    return {param.values: [mark.name for mark in param.marks] for param in params}


def test_pairwise_cells_are_fast_but_for_slow_values() -> None:
    params = pairwise(a=[1, 2], b=["x", "z", pytest.param("y", marks=pytest.mark.slow)], c=[0.5, None]).args[1]
    assert [param.values for param in params] == list(product([1, 2], "xzy", [0.5, None]))
    assert {cell[1:] for cell, marks in levels(params).items() if not marks} == set(product("xz", [0.5, None]))


def test_round_robin_has_one_fast_cell_for_every_value_of_the_first_factor() -> None:
    slow = pytest.param("y", marks=pytest.mark.slow)
    found = levels(round_robin(a=range(5), b=["x", slow, "z"], c=[True, False]).args[1])
    fast = [(0, "x", True), (1, "x", False), (2, "z", True), (3, "z", False), (4, "x", True)]
    assert [cell for cell, marks in found.items() if not marks] == fast
    in_full = [cell for cell, marks in found.items() if marks != ["product"]]
    assert {(a, b) for a, b, _ in in_full} == set(product(range(5), "xyz"))


def test_slow_except_has_three_levels() -> None:
    assert levels(slow_except([1], [1, 2, 3], full=[2])) == {(1,): [], (2,): ["slow"], (3,): ["product"]}
