"""Flags out of dataclasses: a method's settings become options of a verb, so that no default is written twice.

A setting's name, type and default are its field's; its help is what the class docstring says after `name:`.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import typer
from rich.markup import escape

from skipstone.cli import terminal
from skipstone.decoding.method import Method
from skipstone.methods import METHODS

PANEL = "Method settings"


@dataclasses.dataclass(frozen=True)
class Setting:
    """One field of one method. hint: its resolved type. help: the docstring's words on it."""

    name: str
    hint: Any
    default: Any
    help: str

    @property
    def type(self) -> str:
        """The type in a user's words, such as "float|adaptive|none"."""
        return "|".join(_words(self.hint))

    def parse(self, text: str) -> Any:
        """The value that a flag's text means. ValueError names the type."""
        for member in _members(self.hint):
            try:
                return _read(member, text)
            except ValueError:
                continue
        raise ValueError(f"{flag(self.name)} takes {self.type}, found {text!r}")


def settings(kind: type[Method]) -> list[Setting]:
    """A method's settings in the order of its fields."""
    hints = get_type_hints(kind)
    fields = dataclasses.fields(kind)
    words = _documented(inspect.getdoc(kind) or "", [field.name for field in fields])
    return [
        Setting(
            field.name, hints[field.name], None if field.default is dataclasses.MISSING else field.default, words[field.name]
        )
        for field in fields
    ]


def flag(name: str) -> str:
    """The command-line flag of a setting: exit_layer is --exit-layer."""
    return "--" + name.replace("_", "-")


def owners(name: str) -> list[str]:
    """The methods that have a setting."""
    return [method for method, kind in METHODS.items() if any(field.name == name for field in dataclasses.fields(kind))]


def parameters() -> dict[str, inspect.Parameter]:
    """The signature's part that the methods' settings make up. Every default is None: not given, the method's own holds."""
    made: dict[str, inspect.Parameter] = {}
    for kind in METHODS.values():
        for setting in settings(kind):
            name = setting.name
            if name in made:
                continue
            option = typer.Option(
                flag(name), help=escape(_help(name)), metavar="VALUE", show_default=False, rich_help_panel=PANEL
            )
            annotation = Annotated[str | None, option]
            made[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
    return made


def command(name: str, text: str, options: Any, run: Callable[[Any, dict[str, str | None]], None]) -> Any:
    """A verb as a typer command: the flags of a dataclass of options (with a field `debug`), and those of every method."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(options, include_extras=True)
    own = [
        inspect.Parameter(
            field.name,
            keyword,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(options)
    ]
    derived = parameters()
    assert not set(derived) & set(hints), "a method's setting is named like a flag of the command line"

    def verb(**values: Any) -> None:
        context: typer.Context = values.pop("context")
        given = {key: values.pop(key) for key in derived}
        chosen = options(**values)
        context.obj["debug"] = chosen.debug
        with terminal.quiet(chosen.debug):
            run(chosen, given)

    context = inspect.Parameter("context", keyword, annotation=typer.Context)
    signature = [context, *own, *derived.values()]
    verb.__signature__ = inspect.Signature(signature)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in signature}
    single = typer.Typer(add_completion=False)
    single.command(name, help=text)(verb)
    return typer.main.get_command(single)


def wish(method: str | None, given: Mapping[str, str | None], config: str | None) -> dict[str, Any]:
    """What flags and --speculative-config ask for: {"method": ..., setting: value}, "method" left out where neither names one.

    The two may be mixed; where they contradict one another, that is a ValueError: neither wins silently.
    """
    wanted = _configured(config)
    name = method if method is not None else wanted.get("method")
    if name is not None and (not isinstance(name, str) or name not in METHODS):
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    flags: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    if name is not None:
        flags = {"method": name, **{key: _value(name, key, value) for key, value in flags.items()}}
    for key, value in flags.items():
        if wanted.setdefault(key, value) != value:
            raise ValueError(f"{flag(key)} says {value!r}, --speculative-config says {wanted[key]!r}: give one of them")
    return wanted


def _configured(config: str | None) -> dict[str, Any]:
    if config is None:
        return {}
    try:
        wanted = json.loads(config)
    except json.JSONDecodeError as error:
        raise ValueError(f"--speculative-config is not JSON ({error}), found {config!r}") from None
    if not isinstance(wanted, dict):
        raise ValueError(f'--speculative-config must be an object such as {{"method": "layerskip"}}, found {config!r}')
    return wanted


def _value(method: str, name: str, given: str) -> Any:
    for setting in settings(METHODS[method]):
        if setting.name == name:
            return setting.parse(given)
    raise ValueError(
        f"{method} has no {flag(name)}; {' and '.join(owners(name))} {'have' if len(owners(name)) > 1 else 'has'} it"
    )


def _help(name: str) -> str:
    """One text for all methods that share a setting, or each its own."""
    texts: dict[str, list[str]] = {}
    for method in owners(name):
        setting = next(setting for setting in settings(METHODS[method]) if setting.name == name)
        default = "" if setting.default is None else f", default {_shown(setting.default)}"
        texts.setdefault(f"{setting.help} [{setting.type}{default}]", []).append(method)
    return " ".join(f"{', '.join(methods)}: {text}" for text, methods in texts.items())


def _shown(value: Any) -> str:
    """A value as `parse` reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def _documented(text: str, names: list[str]) -> dict[str, str]:
    """What a docstring says after `name:`, up to the next name, as one line each."""
    if not names:
        return {}
    any_name = "|".join(map(re.escape, names))
    found = re.findall(rf"\b({any_name}):\s(.*?)(?=\s\b(?:{any_name}):\s|\Z)", text, flags=re.DOTALL)
    return dict.fromkeys(names, "") | {name: " ".join(words.split()) for name, words in found}


def _members(hint: Any) -> list[Any]:
    """The alternatives of a type, None last so that the word for it is tried last."""
    members = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    return sorted(members, key=lambda member: member is NoneType)


def _words(hint: Any) -> list[str]:
    names: dict[Any, list[str]] = {int: ["int"], float: ["float"], str: ["text"], bool: ["true", "false"], NoneType: ["none"]}
    words: list[str] = []
    for member in _members(hint):
        words += map(str, get_args(member)) if get_origin(member) is Literal else names.get(member, ["json"])
    return words


def _read(member: Any, text: str) -> Any:
    """Text as a value of one type; ValueError where it is none."""
    if get_origin(member) is Literal:
        for choice in get_args(member):
            if text == str(choice):
                return choice
        raise ValueError
    if member is NoneType:
        if text.lower() != "none":
            raise ValueError
        return None
    if member is bool and text not in ("true", "false"):
        raise ValueError
    readers: dict[Any, Callable[[str], Any]] = {int: int, float: float, str: str}
    return readers.get(member, json.loads)(text)
