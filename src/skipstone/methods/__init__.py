"""All decoding methods, written out, and how one is named.

A method is said in one way everywhere: as text, `layerskip exit_layer=4 confidence_threshold=none`, or as a JSON object,
`{"method": "layerskip", "exit_layer": 4}`. Python code may also give the mapping or the Method itself.
"""

import json
import shlex
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from skipstone.decoding.method import OWN_FIELD, DraftingMethod, Method
from skipstone.decoding.settings import Setting, settings_of
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.adasd.adasd import AdaSD
from skipstone.methods.auto.auto import Auto
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.early_exit import EarlyExit
from skipstone.methods.jacobi import Jacobi
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.lookahead import Lookahead
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import Recycle
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.speculative import Speculative
from skipstone.methods.swift.swift import Swift

METHODS: dict[str, type[Method]] = {
    "auto": Auto,
    "autoregressive": Autoregressive,
    "early_exit": EarlyExit,
    "layerskip": LayerSkip,
    "swift": Swift,
    "self_speculative": SelfSpeculative,
    "adadecode": AdaDecode,
    "speculative": Speculative,
    "adasd": AdaSD,
    "prompt_lookup": PromptLookup,
    "jacobi": Jacobi,
    "lookahead": Lookahead,
    "recycle": Recycle,
}

MethodLike = Method | str | Mapping[str, Any] | None
"""How a method can be given: itself, its spelled text, a mapping with the key "method", or None for the model's own, which is
`auto` where it names none."""


class MethodMissing(ValueError):
    """Settings without a method, so that only a model's own default can say which one is meant."""


def resolve(method: MethodLike, defaults: str | Mapping[str, Any] | None = None) -> Method:
    """The method that is meant, as an object.

    defaults: a model's own method, as text or a mapping (`generation_config.skipstone`). It is the method where none is named,
    and it fills in the settings that are left open where the same method is named. A Method object leaves open only the fields
    in `by_model`. Where neither names one it is `auto`. ValueError for unknown methods and settings.
    """
    return _guarded(_made(method, defaults))


def _made(method: MethodLike, defaults: str | Mapping[str, Any] | None) -> Method:
    """As in `resolve`, a guard left to be looked at."""
    if isinstance(method, Auto) and defaults and method.candidates is None and method.own is None:
        return replace(method, own=_several([defaults]))
    if isinstance(method, Method):
        return method.completed(defaults)
    own, settings = _read(defaults, f"generation_config.{OWN_FIELD}") if defaults else (None, {})
    kind, given = (own, {}) if method is None else _read(method, "method", own)
    kind = kind or Auto
    wanted = {**settings, **given} if kind is own else given
    if "own" in kind.of_methods and defaults and own is not kind:
        wanted.setdefault("own", [defaults])
    for name in set(kind.of_methods) & set(wanted):
        wanted[name] = _several(wanted[name])
    return kind(**wanted)


def _guarded(method: Method) -> Method:
    """A method under the controller, where its guard asks for it."""
    if not isinstance(method, DraftingMethod) or method.guard is False:
        return method
    if method.guard is not True:
        raise ValueError(f"guard must be true or false, found {method.guard!r}")
    return Auto(candidates=(method.unguarded,))


def _several(given: Any) -> tuple[Method, ...] | None:
    """The methods that a text with semicolons, or a list, names."""
    if given is None:
        return None
    found = [_made(one, None) for one in (given.split(";") if isinstance(given, str) else given)]
    return tuple(one.unguarded if isinstance(one, DraftingMethod) else one for one in found)


def parse(
    text: str, kinds: Mapping[str, type] = METHODS, own: type | None = None, labels: tuple[str, ...] = (), several: bool = False
) -> dict[str, Any]:
    """{"method": name, setting: value} from a spelled text or a JSON object.

    kinds: the classes by name; the types of their fields tell how values are read. own: the class that a text without a name
    sets, as in `exit_layer=4`. labels: keys that are no settings and stay texts. several: `exit_layer=3,6` is a list of values
    to choose from. Values with spaces stand in quotes. ValueError for anything else.
    """
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"a method that begins with a brace is a JSON object ({error}), found {text!r}") from None
    words = _words(text)
    if not words:
        raise ValueError("a method is a name with settings, such as `layerskip exit_layer=4`; found nothing")
    kind: Any = own if "=" in words[0] else find(words.pop(0), kinds)
    if kind is None:
        raise MethodMissing(f"{text!r} names no method; there are {', '.join(kinds)}")
    found: dict[str, Any] = {"method": kind.name}
    for word in words:
        key, _, value = word.partition("=")
        key = key.replace("-", "_")
        if not value:
            how = "key=value or key=value,value" if several else "key=value"
            raise ValueError(f"settings of a method are {how}; found {word!r} after {kind.name}")
        if key in found:
            raise ValueError(f"{key} is given twice after {kind.name}")
        if key in labels:
            found[key] = value
            continue
        setting = find_setting(kind, key)
        values = value.split(",") if several and not setting.is_list else [value]
        found[key] = [setting.parse(one) for one in values] if len(values) > 1 else setting.parse(value)
    return found


def spell(method: Method) -> str:
    """The text that `resolve` reads as this method."""
    return method.spelled


def find(name: Any, kinds: Mapping[str, type] = METHODS, place: str = "method") -> type:
    """The class of a name. ValueError names those that exist. place: where the name was found, for errors."""
    kind = kinds.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"unknown method {name!r}{'' if place == 'method' else f' in {place}'}; there are {', '.join(kinds)}")
    return kind


def find_setting(kind: Any, key: str) -> Setting:
    """A setting by its own name or another package's. ValueError says which there are, and which methods have this one."""
    known = settings_of(kind)
    name = getattr(kind, "aliases", {}).get(key, key)
    if name not in known:
        owners = ", ".join(other for other in METHODS if name in settings_of(METHODS[other]))
        hint = f" ({name} is a setting of {owners})" if owners else ""
        raise ValueError(f"{kind.name} has no setting {key!r}; it has {', '.join(known) or 'none'}{hint}")
    return known[name]


def _read(given: Any, place: str, own: type[Method] | None = None) -> tuple[type[Method], dict[str, Any]]:
    """The class and the settings that a text or a mapping stands for. own: the class where no method is named."""
    if not isinstance(given, (str, Mapping)):
        raise ValueError(f"{place} must be a Method, a name or a mapping with the key 'method', found {given!r}")
    settings = dict(parse(given, own=own) if isinstance(given, str) else given)
    if "method" in settings:
        kind: Any = find(settings.pop("method"), place=place)
    elif own is not None:
        kind = own
    else:
        raise MethodMissing(f"the key 'method' is missing in {place}={given!r}; there are {', '.join(METHODS)}")
    named: dict[str, Any] = {}
    for key, value in settings.items():
        name = find_setting(kind, key).name
        if name != key:
            warnings.warn(f"{key} is called {name} in skipstone", FutureWarning, stacklevel=5)
        if name in named:
            raise ValueError(f"{name} is given twice")
        named[name] = value
    return kind, named


def _words(text: str) -> list[str]:
    """The words of a text, split at spaces outside quotes."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split, lexer.escape, lexer.commenters = True, "", ""  # a backslash may stand in a path
    try:
        return list(lexer)
    except ValueError:
        raise ValueError(f"a quote is not closed in {text!r}") from None
