"""All decoding methods, written out, and how a user's wish becomes one of them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

from skipstone.core.protocol import Method
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.early_exit import EarlyExit
from skipstone.methods.layerskip import LayerSkip

METHODS: dict[str, type[Method]] = {
    "autoregressive": Autoregressive,
    "early_exit": EarlyExit,
    "layerskip": LayerSkip,
}


def resolve(wish: Method | str | Mapping[str, Any] | None, defaults: Mapping[str, Any] | None = None) -> Method:
    """A method from an object, a name or a vLLM-style {"method": name, ...}.

    defaults: such a mapping, a model's own (`generation_config.skipstone`); it fills in what the wish leaves open when both
    name the same method, and is the method where the wish is None. ValueError for unknown methods and keys.
    """
    if isinstance(wish, Method):
        return wish
    if wish is None:
        if not defaults:
            raise ValueError(f"no method given and the model names no default; pass method= one of {', '.join(METHODS)}")
        wish = defaults
    settings = {"method": wish} if isinstance(wish, str) else dict(wish) if isinstance(wish, Mapping) else None
    if settings is None:
        raise ValueError(f"method must be a Method, a name or a mapping with the key 'method', found {type(wish).__name__}")
    name = settings.pop("method", None)
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"unknown method {name!r}; there are {', '.join(METHODS)}")
    kind = METHODS[name]
    settings = _spelled(kind, settings)
    if defaults and defaults.get("method") == name:
        settings = {**{key: value for key, value in defaults.items() if key != "method"}, **settings}
    known = [field.name for field in dataclasses.fields(kind)]
    if unknown := [key for key in settings if key not in known]:
        raise ValueError(f"{name} has no setting {unknown[0]!r}; it has {', '.join(known) or 'none'}")
    return kind(**settings)


def _spelled(kind: type[Method], settings: dict[str, Any]) -> dict[str, Any]:
    """Settings under their own names, other packages' spellings warned about."""
    spelled: dict[str, Any] = {}
    for key, value in settings.items():
        name = kind.aliases.get(key, key)
        if name != key:
            warnings.warn(f"{key} is called {name} in skipstone", FutureWarning, stacklevel=3)
        if name in spelled:
            raise ValueError(f"{name} is given twice")
        spelled[name] = value
    return spelled
