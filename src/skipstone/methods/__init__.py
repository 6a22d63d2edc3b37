"""All decoding methods, written out, and how a user's wish becomes one of them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from skipstone.decoding.method import OWN_FIELD, Method
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.adasd.adasd import AdaSD
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.early_exit import EarlyExit
from skipstone.methods.jacobi import Jacobi
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.lookahead import Lookahead
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.speculative import Speculative
from skipstone.methods.swift.swift import Swift

METHODS: dict[str, type[Method]] = {
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
}


Wish = Method | str | Mapping[str, Any] | None


def resolve(wish: Wish, defaults: str | Mapping[str, Any] | None = None) -> Method:
    """A method from an object, a name or a vLLM-style {"method": name, ...}.

    defaults: a name or such a mapping, a model's own (`generation_config.skipstone`); it fills in what the wish leaves open
    when both are the same method, and is the method where the wish names none. Of a Method object only what has no other
    default (`by_model`) is left open. ValueError for unknown methods and settings.
    """
    if isinstance(wish, Method):
        return wish.completed(defaults)
    if wish is None and not defaults:
        raise ValueError(f"no method given and the model names no default; pass method= one of {', '.join(METHODS)}")
    if not defaults:
        kind, settings = _read(wish, "method")
        return kind(**settings)
    kind, settings = own = _read(defaults, f"generation_config.{OWN_FIELD}")
    if wish is not None:
        kind, settings = _read({"method": own[0].name, **wish} if isinstance(wish, Mapping) else wish, "method")
    return kind(**{**(own[1] if kind is own[0] else {}), **settings})


def _read(wish: Any, place: str) -> tuple[type[Method], dict[str, Any]]:
    """The class and the settings that a name or a mapping stands for. place: where it was found, for errors."""
    if not isinstance(wish, (str, Mapping)):
        raise ValueError(f"{place} must be a Method, a name or a mapping with the key 'method', found {wish!r}")
    settings: dict[str, Any] = {"method": wish} if isinstance(wish, str) else dict(wish)
    if "method" not in settings:
        raise ValueError(f"the key 'method' is missing in {place}={wish!r}; there are {', '.join(METHODS)}")
    name = settings.pop("method")
    kind = METHODS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ValueError(f"unknown method {name!r} in {place}; there are {', '.join(METHODS)}")
    settings = _spelled(kind, settings)
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := [key for key in settings if key not in known]:
        raise ValueError(f"{name} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return kind, settings


def _spelled(kind: type[Method], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings under their own names, other packages' spellings warned about."""
    spelled: dict[str, Any] = {}
    for key, value in settings.items():
        name = kind.aliases.get(key, key)
        if name != key:
            warnings.warn(f"{key} is called {name} in skipstone", FutureWarning, stacklevel=5)
        if name in spelled:
            raise ValueError(f"{name} is given twice")
        spelled[name] = value
    return spelled
