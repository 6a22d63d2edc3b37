"""All decoding methods, and how to name one.

A method is given as text, `layerskip exit_layer=4 confidence_threshold=none`, or as a JSON object,
`{"method": "layerskip", "exit_layer": 4}`. Python code may also pass a mapping or a Method. `swift preset=paper` sets what a
source does, and settings next to it win.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from skipstone.decoding import method_text
from skipstone.decoding.method import PRESET, DraftingMethod, Method
from skipstone.decoding.method_text import MethodMissing as MethodMissing
from skipstone.decoding.method_text import MethodNames
from skipstone.decoding.settings import settings_of
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.adasd.adasd import AdaSD
from skipstone.methods.auto.auto import Auto
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.eagle3 import Eagle3
from skipstone.methods.early_exit import EarlyExit
from skipstone.methods.jacobi import Jacobi
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.lookahead import Lookahead
from skipstone.methods.mtp import Mtp
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
    "eagle3": Eagle3,
    "mtp": Mtp,
    "prompt_lookup": PromptLookup,
    "jacobi": Jacobi,
    "lookahead": Lookahead,
    "recycle": Recycle,
}

MethodLike = Method | str | Mapping[str, Any] | None
"""Ways to give a method: a Method, its text, a mapping with the key "method", or None for the model's default, else `auto`."""


def resolve(method: MethodLike, defaults: str | Mapping[str, Any] | None = None) -> Method:
    """The Method for a text, a mapping or None. ValueError for unknown methods and settings.

    defaults: a model's own method, as text or a mapping (`generation_config.skipstone`). It is used if no method is named, and
    if the same method is named it fills in missing settings (of a Method object only the fields in `by_model`). Without both
    the method is `auto`.
    """
    return _apply_guard(_make_method(method, defaults))


def _make_method(method: MethodLike, defaults: str | Mapping[str, Any] | None) -> Method:
    """As in `resolve`, before the guard."""
    if isinstance(method, Auto) and defaults and method.candidates is None and method.own is None:
        return replace(method, own=_make_methods([defaults]))
    if isinstance(method, Method):
        return method.completed(defaults)
    default_kind, default_settings = _read(defaults, f"generation_config.{OWN_FIELD}") if defaults else (None, {})
    kind, given = (default_kind, {}) if method is None else _read(method, "method", default_kind)
    kind = kind or Auto
    settings = kind.renamed(default_settings if kind is default_kind else {}, given)
    if "own" in kind.of_methods and defaults and default_kind is not kind:
        settings.setdefault("own", [defaults])
    for name in set(kind.of_methods) & set(settings):
        settings[name] = _make_methods(settings[name])
    return kind(**settings)


def _apply_guard(method: Method) -> Method:
    """`auto` with this method alone if its guard is set, else the method."""
    if not isinstance(method, DraftingMethod) or method.guard is False:
        return method
    if method.guard is not True:
        raise ValueError(f"guard must be true or false, found {method.guard!r}")
    return Auto(candidates=(method.unguarded,))


def _make_methods(given: Any) -> tuple[Method, ...] | None:
    """The methods in a list or in a text with semicolons, without guards."""
    if given is None:
        return None
    items = given.split(";") if isinstance(given, str) else given
    return tuple(_make_method(item, None).unguarded for item in items)


def known(kinds: Mapping[str, type] = METHODS) -> dict[str, MethodNames]:
    """The names in the texts of methods, from their classes."""
    return {name: _names_of(kind) for name, kind in kinds.items()}


@cache
def _names_of(kind: Any) -> MethodNames:
    types = {setting.name: setting.type for setting in settings_of(kind).values()}
    if presets := getattr(kind, "presets", {}):  # a peer has none
        types[PRESET] = "|".join(presets)
    return MethodNames(types, getattr(kind, "aliases", {}))


def spell(method: Method) -> str:
    """The text of a method, which `resolve` reads."""
    return method.spelled


def stored_settings(method: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings from a file by their present names, without warnings. Presets and settings of unknown methods stay unchanged."""
    kind = METHODS.get(method)
    if kind is None:
        return dict(settings)
    preset = {name: value for name, value in settings.items() if name == PRESET}
    return preset | kind.renamed({name: value for name, value in settings.items() if name != PRESET})


def _read(given: Any, place: str, own: type[Method] | None = None) -> tuple[type[Method], dict[str, Any]]:
    """(class, settings with their given names) of a text or a mapping. own: the class if no method is named."""
    if not isinstance(given, (str, Mapping)):
        raise ValueError(f"{place} must be a Method, a name or a mapping with the key 'method', found {given!r}")
    default = {} if own is None else {"method": own.name}
    settings = default | dict(method_text.parse(given, known(), default.get("method")) if isinstance(given, str) else given)
    method_text.check_names(settings, known(), place=place)
    kind = METHODS[settings.pop("method")]
    kind.warn_of_aliases(settings, stacklevel=6)
    return kind, settings
