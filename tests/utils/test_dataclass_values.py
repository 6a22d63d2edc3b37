"""Objects of dataclasses from JSON."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import pytest

from skipstone.utils.dataclass_values import from_values


class Pair(NamedTuple):
    left: int
    right: tuple[float, ...]


@dataclass(slots=True)
class Inner:
    names: list[str]
    by_number: dict[int, tuple[float, bool]]


@dataclass
class Outer:
    inner: Inner
    pair: Pair | None = None
    parts: dict[str, Inner] = field(default_factory=dict)


INNER = Inner(["a"], {3: (1.0, True)})


@pytest.mark.parametrize("value", [Outer(INNER), Outer(INNER, Pair(1, (0.5, float("inf"))), {"x": INNER})])
def test_values_come_back_from_json(value: Outer) -> None:
    assert from_values(Outer, json.loads(json.dumps(asdict(value)))) == value


@pytest.mark.parametrize(
    "values",
    [
        {},
        [],
        {"inner": None},
        {"inner": {"names": "a", "by_number": {}}},
        {"inner": {"names": [1], "by_number": {}}},
        {"inner": {"names": [], "by_number": {"x": [1.0, True]}}},
        {"inner": {"names": [], "by_number": {"3": [1.0]}}},
        {"inner": {"names": [], "by_number": {"3": [True, True]}}},
        {"inner": asdict(INNER), "other": 1},
        {"inner": asdict(INNER), "pair": [1]},
    ],
)
def test_other_values_are_refused(values: Any) -> None:
    with pytest.raises(ValueError, match=r"found|argument|int\(\)"):
        from_values(Outer, values)
