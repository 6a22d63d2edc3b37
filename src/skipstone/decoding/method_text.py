"""Parses methods as text, such as `layerskip exit_layer=4`, by names and types of settings. It does not import torch."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skipstone.decoding.settings import LAYERS, METHODS, parse_value
from skipstone.utils.spelling import did_you_mean


class MethodMissing(ValueError):
    """Settings without the name of a method."""


@dataclass(frozen=True)
class MethodNames:
    """Names in the text of a method. settings: name -> type, as in `Setting.type`. aliases: as in `Method`."""

    settings: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    lossless: bool = True


Known = Mapping[str, MethodNames]


def parse(text: str, known: Known, own: str | None, labels: tuple[str, ...] = (), several: bool = False) -> dict[str, Any]:
    """{"method": name, setting: value} from the text of a method or a JSON object. ValueError for anything else.

    own: the method of a text without a name, such as `exit_layer=4`. labels: keys that are no settings and stay texts. several:
    `exit_layer=3,6` is a list of alternatives. Values with spaces need quotes.
    """
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a method that begins with a brace is a JSON object ({error}), found {text!r}") from None
    words = _words(text)
    if not words:
        raise ValueError("a method is a name with settings, such as `layerskip exit_layer=4`; found nothing")
    name = own if "=" in words[0] else expect_method(words.pop(0), known)
    if name is None:
        raise MethodMissing(f"{text!r} names no method; there are {', '.join(known)}")
    parsed: dict[str, Any] = {"method": name}
    for word in words:
        key, _, value = word.partition("=")
        key = key.replace("-", "_")
        if not value:
            how = "key=value or key=value,value" if several else "key=value"
            raise ValueError(f"settings of a method are {how}; found {word!r} after {name}")
        if key in parsed:
            raise ValueError(f"{key} is given twice after {name}")
        if key in labels:
            parsed[key] = value
            continue
        setting = expect_setting(name, key, known)
        types = known[name].settings[setting]
        texts = value.split(",") if several and LAYERS not in types.split("|") else [value]
        values = [parse_value(setting, types, text) for text in texts]
        parsed[key] = values if len(values) > 1 else values[0]
    return parsed


def check_names(method: Mapping[str, Any], known: Known, labels: tuple[str, ...] = (), place: str = "method") -> None:
    """ValueError for a method or a setting that does not exist, also within settings that name methods. place: where the
    method was given, for messages."""
    if "method" not in method:
        raise MethodMissing(f"the key 'method' is missing in {place}={dict(method)!r}; there are {', '.join(known)}")
    name = expect_method(method["method"], known, place)
    for key, value in method.items():
        if key == "method" or key in labels:
            continue
        types = known[name].settings[expect_setting(name, key, known)]
        if METHODS in types.split("|") and isinstance(value, str):
            for text in value.split(";"):
                check_names(parse(text, known, None), known)


def expect_method(name: Any, known: Known, place: str = "method") -> str:
    """The name, if it is a method's. ValueError lists the methods. place: where the name was given, for messages."""
    if not isinstance(name, str) or name not in known:
        where = "" if place == "method" else f" in {place}"
        raise ValueError(f"unknown method {name!r}{where}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return name


def expect_setting(method: str, key: str, known: Known) -> str:
    """The setting with this name or alias. ValueError lists the method's settings, and other methods with this one."""
    names = known[method]
    name = names.aliases.get(key, key)
    if name not in names.settings:
        owners = ", ".join(other for other, about in known.items() if name in about.settings)
        hint = f" ({name} is a setting of {owners})" if owners else ""
        meant = "" if owners else did_you_mean(key, [*names.settings, *names.aliases])
        raise ValueError(f"{method} has no setting {key!r}{meant}; it has {', '.join(names.settings) or 'none'}{hint}")
    return name


def _words(text: str) -> list[str]:
    """The words of a text, split at spaces outside quotes."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""  # a backslash may stand in a path
    try:
        return list(lexer)
    except ValueError:
        raise ValueError(f"a quote is not closed in {text!r}") from None
