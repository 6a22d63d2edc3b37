"""Settings of methods: declaration, description, parsing, and checks that several methods share."""

import dataclasses
import json
import math
import shlex
import warnings
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

if TYPE_CHECKING:  # the command line reads settings before it imports torch
    from skipstone.engines.model_runner import ModelRunner

RejectionRule = Literal["standard", "coupled"]

ANY_NUMBER = (-math.inf, math.inf)  # (lowest, highest) value without limits
LAYERS, METHODS = "int,...", "method;..."  # types of settings that are lists
_BOOLEANS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def setting(
    default: Any, help: str, *, min_value: int = 1, within: tuple[float, float] = ANY_NUMBER, kw_only: bool = False
) -> Any:
    """A field of a method. help: one line for `skipstone methods NAME`. min_value: of a whole number. within: lowest and
    highest value of any other number."""
    about = {"help": help, "min_value": min_value, "within": within}
    return dataclasses.field(default=default, kw_only=kw_only, metadata={"skipstone": about})


@dataclasses.dataclass(frozen=True)
class Setting:
    """One setting of a method. hint: its Python type. default: None also if it has no default. Others: as in `setting`."""

    name: str
    hint: Any
    default: Any
    help: str = ""
    min_value: float = -math.inf
    within: tuple[float, float] = ANY_NUMBER

    @property
    def members(self) -> tuple[Any, ...]:
        """The alternatives of the type: (float, Literal["adaptive"], None) for `float | Literal["adaptive"] | None`."""
        return get_args(self.hint) if get_origin(self.hint) in (Union, UnionType) else (self.hint,)

    @property
    def type(self) -> str:
        """The type for users, such as "float|adaptive|none", without Python objects, which no text can express."""
        return "|".join(word for member in self.members for word in _words(member))

    def check(self, value: Any) -> None:
        """ValueError for an invalid value. Methods check lists, objects and mixed types (`int | float`) themselves."""
        choices = [choice for member in self.members if get_origin(member) is Literal for choice in get_args(member)]
        kinds = [member for member in self.members if get_origin(member) is not Literal and member is not NoneType]
        is_choice = any(type(value) is type(choice) and value == choice for choice in choices)
        if is_choice or (value is None and NoneType in self.members):
            return
        if kinds == [int] and not choices:
            whole_number(self.name, value, self.min_value)
            return
        low, high = self.within
        number = "a number" if self.within == ANY_NUMBER else f"a number in [{low:g}, {high:g}]"
        rules: dict[tuple[Any, ...], tuple[list[str], bool]] = {
            (): ([], False),
            (bool,): (["true", "false"], isinstance(value, bool)),
            (str,): (["a text"], isinstance(value, (str, Path))),
            (float,): ([number], isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high),
        }
        words, fits = rules.get(tuple(kinds), ([], True))
        if not fits:
            *more, last = [*words, *map(json.dumps, choices), *["None"] * (NoneType in self.members)]
            raise ValueError(f"{self.name} must be {', '.join(more)}{' or ' if more else ''}{last}, found {value!r}")


def _words(member: Any) -> list[str]:
    """A type without alternatives in a user's words."""
    if get_origin(member) is Literal:
        return list(map(str, get_args(member)))
    if get_origin(member) is tuple:
        return [LAYERS if get_args(member)[0] is int else METHODS]
    return {int: ["int"], float: ["float"], str: ["text"], bool: ["true", "false"], NoneType: ["none"]}.get(member, [])


@cache
def settings_of(kind: type) -> dict[str, Setting]:
    """The settings of a method's class by name: positional ones first, then keyword-only ones."""
    hints = get_type_hints(kind)
    settings = {}
    for field in sorted(dataclasses.fields(kind), key=lambda field: field.kw_only is True):
        default = None if field.default is dataclasses.MISSING else field.default
        settings[field.name] = Setting(field.name, hints[field.name], default, **field.metadata.get("skipstone", {}))
    return settings


def parse_value(name: str, types: str, text: str) -> Any:
    """The value of a text for a setting. types: as in `Setting.type`. ValueError names them."""
    for word in sorted(types.split("|"), key=lambda word: word != "none"):
        try:
            return _value(word, text)
        except (ValueError, KeyError):
            continue
    raise ValueError(f"{name} takes {types}, found {text!r}")


def spell_value(value: Any) -> str:
    """A value in the text of a method; strings with spaces are quoted."""
    if isinstance(value, str):
        return shlex.quote(value) if set(value) & set(" \t\n'\"") else value
    return "none" if value is None else json.dumps(value, separators=(",", ":"))


def _value(word: str, text: str) -> Any:
    """A text as a value of one type. ValueError or KeyError if it is not of this type."""
    if word in ("true", "false"):
        return _BOOLEANS[text.lower()]
    if word == "none":
        return {"none": None, "null": None}[text.lower()]
    if word == LAYERS:
        return json.loads(text) if text.startswith("[") else [int(number) for number in text.split(",")]
    if word in ("text", METHODS):  # `methods.resolve` checks names of methods
        return text
    if word in ("int", "float"):
        return int(text) if word == "int" else float(text)
    return {word: word}[text]


TRAINED_EXITS = "trained_exit_layers"
"""Field of a model's config that training writes: the exits E, counted from 1, that its early-exit loss covered."""


def check_exit_layer(value: Any, model: "ModelRunner") -> None:
    """ValueError unless an exit layer E is an int in [1, L-1]. A warning if the model was trained for other exits only."""
    layer_in_range("exit_layer", value, model)
    trained = getattr(model.config, TRAINED_EXITS, None)
    if trained and value not in trained:
        warnings.warn(
            f"exit_layer={value} was not trained in this model: its early-exit loss covered {', '.join(map(str, trained))} "
            "(counted from 1). Drafts from another layer are accepted less often",
            stacklevel=4,
        )


def layer_in_range(name: str, value: Any, model: "ModelRunner") -> None:
    """ValueError unless value is an int in [1, L-1]."""
    if value is None:
        raise ValueError(
            f"{name} is not set, and this model has no default for it: pass an integer from 1 to {model.depth - 1}; "
            "`skipstone inspect MODEL` shows where an early exit would pay"
        )
    whole_number(name, value, 1)
    if value >= model.depth:
        raise ValueError(f"{name} must lie between 1 and {model.depth - 1} for a model of {model.depth} layers, found {value}")


def whole_numbers(name: str, value: Any, what: str = "layer numbers") -> tuple[int, ...]:
    """Whole numbers (one, a list or a tuple) as a tuple. ValueError for other values, which says what they are."""
    numbers = [value] if type(value) is int else value
    if not isinstance(numbers, (list, tuple)) or not all(type(number) is int for number in numbers):
        raise ValueError(f"{name} must be {what}, found {value!r}")
    return tuple(numbers)


def whole_number(name: str, value: Any, min_value: float) -> None:
    """ValueError unless value is an int (no bool) of at least `min_value`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, found {value!r}")
    if value < min_value:
        raise ValueError(f"{name} must be at least {min_value}, found {value}")
