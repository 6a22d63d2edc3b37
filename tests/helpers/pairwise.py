"""A few cells of a product in which every pair of values still meets; the rest of the product is marked slow.

Most faults take one value or two that meet. Of four factors with 2, 2, 2 and 3 values the product has 24 cells; 7 of them hold
every pair (a covering array of strength two).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[tuple[int, int], tuple[int, int]]


def covering(sizes: Sequence[int], given: Iterable[tuple[int, ...]] = ()) -> list[tuple[int, ...]]:
    """Cells of range(sizes[0]) x range(sizes[1]) x ... in which every two values of two factors meet, in the product's order.

    Greedy and deterministic: the next cell is the first that holds the most pairs that no cell holds yet. given: cells that are
    run in any case.
    """
    cells = list(product(*map(range, sizes)))
    open_pairs: set[Pair] = {pair for cell in cells for pair in _pairs(cell)}
    chosen = set(given)
    for cell in chosen:
        open_pairs -= _pairs(cell)
    if len(sizes) < 2:
        return cells
    while open_pairs:
        best = max(cells, key=lambda cell: len(_pairs(cell) & open_pairs))
        open_pairs -= _pairs(best)
        chosen.add(best)
    return sorted(chosen)


def crossed(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over a whole product, of which all but a covering array is slow.

    A factor's values may be `pytest.param`s with ids and marks of their own; a value that is slow by itself needs no fast cell.
    """
    return _parametrized(factors, covering)


def in_turn(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """`crossed` with fewer fast cells: every value of the first factor is in one, and the cells of the others take turns.

    For products whose cells take long, where the first factor is what the test is about.
    """
    return _parametrized(factors, _turns)


def _turns(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    others = list(product(*map(range, sizes[1:])))
    return [(index, *others[index % len(others)]) for index in range(sizes[0])]


def _parametrized(
    factors: dict[str, Iterable[Any]], choose: Callable[[Sequence[int]], list[tuple[int, ...]]]
) -> pytest.MarkDecorator:
    """choose: the fast cells of a product of such sizes, which has no value that is slow by itself."""
    values = [[value if _is_param(value) else pytest.param(value) for value in given] for given in factors.values()]
    fast = [[index for index, value in enumerate(column) if not _slow(value)] for column in values]
    chosen = {tuple(fast[i][place] for i, place in enumerate(cell)) for cell in choose(list(map(len, fast)))}
    rows = []
    for cell in product(*(range(len(column)) for column in values)):
        params: list[Any] = [column[index] for column, index in zip(values, cell, strict=True)]
        marks = [mark for param in params for mark in param.marks if mark.name != "slow"]
        names = [
            param.id or _name(factor, param.values[0], index)
            for (factor, param, index) in zip(factors, params, cell, strict=True)
        ]
        marks += [] if cell in chosen else [pytest.mark.slow]
        rows.append(pytest.param(*(param.values[0] for param in params), id="-".join(names), marks=marks))
    return pytest.mark.parametrize(tuple(factors), rows)


def _pairs(cell: tuple[int, ...]) -> set[Pair]:
    return set(combinations(enumerate(cell), 2))


def _is_param(value: Any) -> bool:
    return hasattr(value, "marks") and hasattr(value, "values") and hasattr(value, "id")


def _slow(param: Any) -> bool:
    return any(mark.name == "slow" for mark in param.marks)


def _name(factor: str, value: Any, index: int) -> str:
    """Short values by themselves, others by their factor and place, as pytest does."""
    return str(value) if isinstance(value, (str, int, float, bool, type(None))) else f"{factor}{index}"


def all_but(fast: Iterable[Any], values: Iterable[Any]) -> list[Any]:
    """The values for `pytest.mark.parametrize`: all but those of `fast` are slow. A tuple holds those of several arguments."""
    chosen, slow = list(fast), pytest.mark.slow
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    return [pytest.param(*one, marks=[] if (one if len(one) > 1 else one[0]) in chosen else slow) for one in several]
