"""Which engine runs a model: what the user asked for, and what can run it."""

import os
from typing import Any
from weakref import WeakKeyDictionary

import torch

from skipstone.models.engines.eager.eager import EagerEngine
from skipstone.models.engines.engine import ENGINES, Engine
from skipstone.models.engines.native.engine import NativeEngine, why_not
from skipstone.models.facts import Facts
from skipstone.models.memo import Memo
from skipstone.models.modules import unwrapped

VARIABLE = "SKIPSTONE_ENGINE"
"""The environment variable that says which engine runs the models of which nothing else was said."""

KV_VARIABLE = "SKIPSTONE_KV"
"""The environment variable that says what keys and values are kept in where nothing else was said."""
KV_DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""What keys and values may be kept in, and the dtype of a `KVStore`: float32 is what the native engine computes in, and stands
for what the eager engine computes in, too."""

_ATTACHED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()

_KV_ATTACHED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class _Made:
    """The engines of a model, as they were asked for, while its facts hold. chosen: by the name that was asked for."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.chosen: dict[str, tuple[Engine, str | None]] = {}


_MADE: Memo[_Made] = Memo()


def known(engine: str, source: str = "engine") -> str:
    """The name of an engine. ValueError for any other text. source: where it was read, for the error."""
    if engine not in ENGINES:
        raise ValueError(f"{source} must be one of {', '.join(ENGINES)}, found {engine!r}")
    return engine


def attach(model: Any, engine: str) -> None:
    """Remember which engine a model was asked to run on, for as long as it lives."""
    _ATTACHED[unwrapped(model)] = known(engine)


def asked_for(model: Any, engine: str | None) -> str:
    """The engine to ask for: the one given, or what was attached to the model, or what the environment says, or "auto".
    ValueError for a name that is none."""
    if engine is not None:
        return known(engine)
    if (attached := _ATTACHED.get(unwrapped(model))) is not None:
        return attached
    return known(os.environ.get(VARIABLE) or "auto", VARIABLE)


def known_kv(kv_dtype: str, source: str = "kv_dtype") -> str:
    """The name of a dtype of keys and values. ValueError for any other text. source: where it was read, for the error."""
    if kv_dtype not in KV_DTYPES:
        raise ValueError(f"{source} must be one of {', '.join(KV_DTYPES)}, found {kv_dtype!r}")
    return kv_dtype


def attach_kv(model: Any, kv_dtype: str) -> None:
    """Remember what a model's keys and values are to be kept in, for as long as it lives."""
    _KV_ATTACHED[unwrapped(model)] = known_kv(kv_dtype)


def asked_kv(model: Any, kv_dtype: str | None) -> str:
    """What to keep keys and values in: the name given, or what was attached to the model, or what the environment says, or
    "float32". ValueError for a name that is none."""
    if kv_dtype is not None:
        return known_kv(kv_dtype)
    if (attached := _KV_ATTACHED.get(unwrapped(model))) is not None:
        return attached
    return known_kv(os.environ.get(KV_VARIABLE) or "float32", KV_VARIABLE)


def choose(asked: str, model: Any, facts: Facts) -> tuple[Engine, str | None]:
    """The engine of a model, made once, and the reason why it is not the native one where "auto" had to do without.

    ValueError for a name that is none, and for "native" where the native engine cannot run the model.
    """
    made = _MADE.get(model, None, lambda: _Made(facts), lambda made: made.facts is facts)
    found = made.chosen.get(known(asked))
    if found is None or found[1] is not None or not found[0].holds():  # what kept native away may be gone
        found = made.chosen[asked] = _choice(asked, model, facts)
    return found


def _choice(asked: str, model: Any, facts: Facts) -> tuple[Engine, str | None]:
    if asked == "eager":
        return EagerEngine(model, facts), None
    reason = why_not(model, facts)
    if asked == "native":
        if reason is not None:
            raise ValueError(f"engine='native' cannot run this model: {reason}; take engine='auto' or 'eager'")
        return NativeEngine(model, facts), None
    return choose("native", model, facts) if reason is None else (choose("eager", model, facts)[0], reason)
