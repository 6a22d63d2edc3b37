"""All decoding methods, written out, and how one is named.

A method is said in one way everywhere: as text, `layerskip exit_layer=4 confidence_threshold=none`, or as a JSON object,
`{"method": "layerskip", "exit_layer": 4}`. Python code may also give the mapping or the Method itself.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from skipstone.decoding import method_text
from skipstone.decoding.method import DraftingMethod, Method
from skipstone.decoding.method_text import MethodMissing as MethodMissing
from skipstone.decoding.method_text import MethodNames
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
from skipstone.models.generation_config import OWN_FIELD

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
    wanted = kind.renamed(settings if kind is own else {}, given)
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
    """As `method_text.parse`, by the classes of methods."""
    name: Any = None if own is None else getattr(own, "name")  # noqa: B009  # any class that `kinds` may hold
    return method_text.parse(text, _known(kinds), name, labels, several)


def _known(kinds: Mapping[str, type]) -> dict[str, MethodNames]:
    return {name: names_of(kind) for name, kind in kinds.items()}


@cache
def names_of(kind: Any) -> MethodNames:
    """What the text of a method may say, from its class."""
    types = {setting.name: setting.type for setting in settings_of(kind).values()}
    return MethodNames(types, getattr(kind, "aliases", {}))


def spell(method: Method) -> str:
    """The text that `resolve` reads as this method."""
    return method.spelled


def find(name: Any, kinds: Mapping[str, type] = METHODS, place: str = "method") -> type:
    """The class of a name. ValueError names those that exist. place: where the name was found, for errors."""
    return kinds[method_text.expect_method(name, _known(kinds), place)]


def find_setting(kind: Any, key: str) -> Setting:
    """A setting by its own name or an alias. ValueError says which there are, and which methods have this one."""
    known = _known({**METHODS, kind.name: kind})
    return settings_of(kind)[method_text.expect_setting(kind.name, key, known)]


def stored_settings(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that a file holds by their present names, without a warning; those of a peer as they are."""
    kind = METHODS.get(method)
    return dict(settings) if kind is None else kind.renamed(settings)


def _read(given: Any, place: str, own: type[Method] | None = None) -> tuple[type[Method], dict[str, Any]]:
    """The class and the settings, as they were named, that a text or a mapping stands for. own: the class where no method is
    named."""
    if not isinstance(given, (str, Mapping)):
        raise ValueError(f"{place} must be a Method, a name or a mapping with the key 'method', found {given!r}")
    settings = dict(parse(given, own=own) if isinstance(given, str) else given)
    if "method" in settings:
        kind: Any = find(settings.pop("method"), place=place)
    elif own is not None:
        kind = own
    else:
        raise MethodMissing(f"the key 'method' is missing in {place}={given!r}; there are {', '.join(METHODS)}")
    for key in settings:
        find_setting(kind, key)
    kind.warn_of_aliases(settings, stacklevel=6)
    return kind, settings
