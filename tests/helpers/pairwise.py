"""Levels for the cells of a product of settings: few run in `make test`, more in `make test-full`, all in `make test-all`."""

from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

Cell = tuple[int, ...]
Pair = tuple[tuple[int, int], tuple[int, int]]


def covering_array(sizes: Sequence[int], given: Iterable[Cell] = ()) -> list[Cell]:
    """Cells of range(sizes[0]) x range(sizes[1]) x ... in which every two values of two factors meet, in the product's order.

    Greedy and deterministic: the next cell is the first that holds the most missing pairs. given: cells that run in any case.
    """
    cells = list(product(*map(range, sizes)))
    if len(sizes) < 2:
        return cells
    missing: set[Pair] = {pair for cell in cells for pair in _pairs(cell)}
    chosen = set(given)
    for cell in chosen:
        missing -= _pairs(cell)
    while missing:
        best = max(cells, key=lambda cell: len(_pairs(cell) & missing))
        missing -= _pairs(best)
        chosen.add(best)
    return sorted(chosen)


def turns(sizes: Sequence[int]) -> list[Cell]:
    """One cell for every value of the first factor; the cells of the other factors take turns."""
    others = list(product(*map(range, sizes[1:])))
    return [(index, *others[index % len(others)]) for index in range(sizes[0])]


def pairwise(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize` over a product: a covering array is fast, and all other cells are for `make test-all` only.

    A factor's values may be `pytest.param`s with ids and marks of their own. Cells with a slow value are never fast; those that
    complete the covering array are slow.
    """
    return _parametrize(factors, covering_array)


def round_robin(**factors: Iterable[Any]) -> pytest.MarkDecorator:
    """`pairwise` with fewer fast cells, one for each value of the first factor. The rest of a covering array is slow."""
    return _parametrize(factors, turns)


def slow_except(fast: Iterable[Any], values: Iterable[Any], full: Collection[Any] | None = None) -> list[Any]:
    """The values for `pytest.mark.parametrize`, slow but for those of `fast`. A tuple holds those of several arguments.

    full: the values that `make test-full` runs; all others are for `make test-all` only.
    """
    chosen, params = list(fast), []
    for value in values:
        level = [] if value in chosen else pytest.mark.slow if full is None or value in full else pytest.mark.product
        params.append(pytest.param(*value if isinstance(value, tuple) else (value,), marks=level))
    return params


def _parametrize(factors: dict[str, Iterable[Any]], choose: Callable[[Sequence[int]], list[Cell]]) -> pytest.MarkDecorator:
    """choose: the fast cells of a product of such sizes without slow values."""
    columns = [[value if hasattr(value, "marks") else pytest.param(value) for value in given] for given in factors.values()]
    fast_values = [[index for index, param in enumerate(column) if not _has_level(param)] for column in columns]
    fast = {tuple(map(list.__getitem__, fast_values, cell)) for cell in choose([*map(len, fast_values)])}
    full = covering_array([*map(len, columns)], fast)
    params = []
    for cell in product(*(range(len(column)) for column in columns)):
        chosen = [column[index] for column, index in zip(columns, cell, strict=True)]
        marks = [mark for param in chosen for mark in param.marks if mark.name != "slow"]
        marks += [] if cell in fast else [pytest.mark.slow if cell in full else pytest.mark.product]
        names = [param.id or _name(*named) for param, *named in zip(chosen, factors, chosen, cell, strict=True)]
        params.append(pytest.param(*(param.values[0] for param in chosen), id="-".join(names), marks=marks))
    return pytest.mark.parametrize(tuple(factors), params)


def _pairs(cell: Cell) -> set[Pair]:
    return set(combinations(enumerate(cell), 2))


def _has_level(param: Any) -> bool:
    return any(mark.name == "slow" for mark in param.marks)


def _name(factor: str, param: Any, index: int) -> str:
    """Short values by themselves, others by their factor and place, as pytest does."""
    value = param.values[0]
    return str(value) if isinstance(value, (str, int, float, bool, type(None))) else f"{factor}{index}"
