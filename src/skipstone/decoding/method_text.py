"""A method as text, `layerskip exit_layer=4`, read by the names and types of settings alone: nothing here imports torch."""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skipstone.decoding.settings import LAYERS, METHODS, parse_value
from skipstone.utils.settings_files import did_you_mean


class MethodMissing(ValueError):
    """Settings without a method, so that only a model's own default can say which one is meant."""


@dataclass(frozen=True)
class MethodNames:
    """What the text of a method may say. settings: types by name, as in `Setting.type`. aliases: as in `Method`."""

    settings: Mapping[str, str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    lossless: bool = True


Known = Mapping[str, MethodNames]


def parse(text: str, known: Known, own: str | None, labels: tuple[str, ...] = (), several: bool = False) -> dict[str, Any]:
    """{"method": name, setting: value} from a spelled text or a JSON object.

    own: the method that a text without a name sets, as in `exit_layer=4`. labels: keys that are no settings and stay texts.
    several: `exit_layer=3,6` is a list of values to choose from. Values with spaces stand in quotes. ValueError for anything
    else.
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
    found: dict[str, Any] = {"method": name}
    for word in words:
        key, _, value = word.partition("=")
        key = key.replace("-", "_")
        if not value:
            how = "key=value or key=value,value" if several else "key=value"
            raise ValueError(f"settings of a method are {how}; found {word!r} after {name}")
        if key in found:
            raise ValueError(f"{key} is given twice after {name}")
        if key in labels:
            found[key] = value
            continue
        setting = expect_setting(name, key, known)
        types = known[name].settings[setting]
        values = value.split(",") if several and LAYERS not in types.split("|") else [value]
        read = [parse_value(setting, types, one) for one in values]
        found[key] = read if len(read) > 1 else read[0]
    return found


def check_names(wanted: Mapping[str, Any], known: Known, labels: tuple[str, ...] = ()) -> None:
    """ValueError for a method or a setting that does not exist, also within a setting that names methods."""
    if "method" not in wanted:
        raise MethodMissing(f"the key 'method' is missing in {dict(wanted)!r}; there are {', '.join(known)}")
    name = expect_method(wanted["method"], known)
    for key, value in wanted.items():
        if key == "method" or key in labels:
            continue
        types = known[name].settings[expect_setting(name, key, known)]
        if METHODS in types.split("|") and isinstance(value, str):
            for text in value.split(";"):
                check_names(parse(text, known, None), known)


def expect_method(name: Any, known: Known, place: str = "method") -> str:
    """The name. ValueError, with the names that exist, where it is none. place: where it was found, for errors."""
    if not isinstance(name, str) or name not in known:
        where = "" if place == "method" else f" in {place}"
        raise ValueError(f"unknown method {name!r}{where}{did_you_mean(name, known)}; there are {', '.join(known)}")
    return name


def expect_setting(method: str, key: str, known: Known) -> str:
    """The name of a setting that is called so, or that has this alias. ValueError says which there are, and which methods
    have this one."""
    own = known[method]
    name = own.aliases.get(key, key)
    if name not in own.settings:
        owners = ", ".join(other for other, about in known.items() if name in about.settings)
        hint = f" ({name} is a setting of {owners})" if owners else ""
        meant = "" if owners else did_you_mean(key, [*own.settings, *own.aliases])
        raise ValueError(f"{method} has no setting {key!r}{meant}; it has {', '.join(own.settings) or 'none'}{hint}")
    return name


def _words(text: str) -> list[str]:
    """The words of a text, split at spaces outside quotes."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""  # a backslash may stand in a path
    try:
        return list(lexer)
    except ValueError:
        raise ValueError(f"a quote is not closed in {text!r}") from None
