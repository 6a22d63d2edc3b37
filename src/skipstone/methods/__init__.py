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


Wish = Method | str | Mapping[str, Any] | None


def resolve(wish: Wish, defaults: str | Mapping[str, Any] | None = None) -> Method:
    """A method from an object, a name or a vLLM-style {"method": name, ...}.

    defaults: a name or such a mapping, a model's own (`generation_config.skipstone`); it fills in what the wish leaves open
    when both name the same method, and is the method where the wish is None. ValueError for unknown methods and settings.
    """
    if isinstance(wish, Method):
        return wish
    if wish is None and not defaults:
        raise ValueError(f"no method given and the model names no default; pass method= one of {', '.join(METHODS)}")
    kind, settings = _read(defaults, "generation_config.skipstone") if wish is None else _read(wish, "method")
    if wish is not None and isinstance(defaults, Mapping) and defaults.get("method") == kind.name:
        settings = {**_read(defaults, "generation_config.skipstone")[1], **settings}
    return kind(**settings)


def _read(wish: Any, place: str) -> tuple[type[Method], dict[str, Any]]:
    """The class and the settings that a name or a mapping stands for. place: where it was found, for errors."""
    if not isinstance(wish, (str, Mapping)):
        raise ValueError(f"{place} must be a Method, a name or a mapping with the key 'method', found {wish!r}")
    settings: dict[str, Any] = {"method": wish} if isinstance(wish, str) else dict(wish)
    name = settings.pop("method", None)
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
