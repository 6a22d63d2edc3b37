"""Values that a setting may have by its type, `min_value` and `within`."""

import dataclasses
import math
from typing import Any, Literal

import pytest

from skipstone.decoding.settings import setting, settings_of


@dataclasses.dataclass
class Example:
    """Not a method: only its fields are read."""

    count: int = setting(3, "a whole number.")
    steps: int | None = setting(None, "from 0 on.", min_value=0)
    share: float = setting(0.5, "a share.", within=(0, 1))
    scale: float = setting(1.0, "any number.")
    above: float | Literal["adaptive"] | None = setting(None, "at least 1.", within=(1, math.inf))
    flag: bool = setting(True, "on or off.")
    width: Literal[2, 4] = setting(2, "one of two.")
    name: str = setting("", "a text.")
    plain: int = 0
    foreign: int = dataclasses.field(default=-1, metadata={"unit": "tokens"})


RIGHT: list[tuple[str, Any]] = [
    *(("count", 1), ("steps", 0), ("steps", None), ("share", 0), ("share", 1.0), ("scale", -3), ("above", "adaptive")),
    *(("above", None), ("above", 7.5), ("flag", False), ("width", 4), ("name", "x"), ("plain", 0), ("foreign", -1)),
]
WRONG: list[tuple[str, Any, str]] = [
    ("count", 0, "count must be at least 1, found 0"),
    ("count", 2.0, "count must be an integer, found 2.0"),
    ("count", True, "count must be an integer, found True"),
    ("count", None, "count must be an integer, found None"),
    ("steps", -1, "steps must be at least 0, found -1"),
    ("share", 1.5, "share must be a number in [0, 1], found 1.5"),
    ("share", math.nan, "share must be a number in [0, 1], found nan"),
    ("share", True, "share must be a number in [0, 1], found True"),
    ("scale", "1", "scale must be a number, found '1'"),
    ("above", 0.5, 'above must be a number in [1, inf], "adaptive" or None, found 0.5'),
    ("above", "always", "above must be a number in [1, inf], \"adaptive\" or None, found 'always'"),
    ("flag", 1, "flag must be true or false, found 1"),
    ("width", 3, "width must be 2 or 4, found 3"),
    ("width", "2", "width must be 2 or 4, found '2'"),
    ("plain", 0.5, "plain must be an integer, found 0.5"),
]


@pytest.mark.parametrize(("name", "value"), RIGHT)
def test_right_values_are_taken(name: str, value: Any) -> None:
    settings_of(Example)[name].check(value)


@pytest.mark.parametrize(("name", "value", "said"), WRONG)
def test_wrong_values_are_one_sentence(name: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError) as caught:
        settings_of(Example)[name].check(value)
    assert str(caught.value) == said
