"""What the settings of a method may be: the checks that several methods share."""

from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from skipstone.models.layered import LayeredModel

RejectionRule = Literal["standard", "coupled"]


def setting(default: Any, help: str, *, kw_only: bool = False) -> Any:
    """A field of a method: its default, and one line that says what it is, for `skipstone methods NAME`."""
    return field(default=default, kw_only=kw_only, metadata={"help": help})


def check_rule(value: Any) -> None:
    """ValueError unless value is a RejectionRule."""
    if value not in ("standard", "coupled"):
        raise ValueError(f'rejection_sample_method must be "standard" or "coupled", found {value!r}')


def check_flag(name: str, value: Any) -> None:
    """ValueError unless value is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, found {value!r}")


def layer_in_range(name: str, value: Any, model: LayeredModel) -> None:
    """ValueError unless value is an int in [1, L-1]."""
    if value is None:
        raise ValueError(
            f"{name} is not set and this model carries no default for it: pass an integer from 1 to {model.depth - 1}; "
            "`skipstone inspect MODEL` shows where an early exit would pay"
        )
    whole_number(name, value, 1)
    if value >= model.depth:
        raise ValueError(f"{name} must lie between 1 and {model.depth - 1} for a model of {model.depth} layers, found {value}")


def layer_numbers(name: str, value: Any) -> tuple[int, ...]:
    """Layers as a tuple: YAML and JSON have lists. ValueError for what are no whole numbers."""
    layers = [value] if type(value) is int else value
    if not isinstance(layers, (list, tuple)) or not all(type(layer) is int for layer in layers):
        raise ValueError(f"{name} must be layer numbers, found {value!r}")
    return tuple(layers)


def whole_number(name: str, value: Any, least: int) -> None:
    """ValueError unless value is an int (no bool) of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, found {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, found {value}")
