"""Makes objects of dataclasses from plain JSON values, as `dataclasses.asdict` and JSON have left them."""

from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints


def from_values(kind: Any, values: Any) -> Any:
    """An object of a type: a dataclass, a NamedTuple, or one of Python's own with such parts. ValueError for values of another
    type. Numbers as keys may have become texts."""
    origin, inner = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:  # with None
        return None if values is None else from_values(inner[0], values)
    if not inner:
        fields = _fields(kind)
        return _plain(kind, values) if fields is None else _object(kind, fields, values)
    if not isinstance(values, dict if origin is dict else list):
        raise ValueError(f"expected {kind}, found {values!r:.80}")
    if isinstance(values, dict):
        return {from_values(inner[0], key): from_values(inner[1], value) for key, value in values.items()}
    kinds = inner if origin is tuple and inner[-1] is not ... else [inner[0]] * len(values)
    parts = [from_values(one, value) for one, value in zip(kinds, values, strict=True)]
    return tuple(parts) if origin is tuple else parts


@cache
def _fields(kind: Any) -> dict[str, Any] | None:
    """The types of the fields of a dataclass or NamedTuple; None for another type."""
    return get_type_hints(kind) if is_dataclass(kind) or hasattr(kind, "_fields") else None


def _object(kind: Any, fields: dict[str, Any], values: Any) -> Any:
    if isinstance(values, list):  # of a NamedTuple
        values = dict(zip(fields, values, strict=True))
    if not isinstance(values, dict) or not values.keys() <= fields.keys():
        raise ValueError(f"expected {kind.__name__} with {', '.join(fields)}, found {values!r:.80}")
    try:
        return kind(**{name: from_values(fields[name], value) for name, value in values.items()})
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


def _plain(kind: type, value: Any) -> Any:
    if kind is int and isinstance(value, str):  # a key
        return int(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise ValueError(f"expected {kind.__name__}, found {value!r:.80}")
    return value
