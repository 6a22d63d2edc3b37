"""Which engine runs a model: what the user asked for, and what can run it."""

import os
from dataclasses import dataclass, fields
from typing import Any
from weakref import WeakKeyDictionary

import torch

from skipstone.engines.compiled import CompiledEngine
from skipstone.engines.eager.eager import EagerEngine
from skipstone.engines.engine import ENGINES, QUANTIZED, Engine
from skipstone.engines.host_transfer import CPU
from skipstone.engines.native.engine import NativeEngine, why_not
from skipstone.engines.native.weights import quantised_bytes
from skipstone.models.facts import Facts
from skipstone.models.modules import unwrapped
from skipstone.models.per_model_cache import PerModelCache
from skipstone.utils.limits import WEIGHT_COPIES_SHARE, device_memory_bytes

VARIABLE = "SKIPSTONE_ENGINE"
"""The environment variable that says which engine runs the models of which nothing else was said."""
KV_VARIABLE = "SKIPSTONE_KV"
"""The environment variable that says what keys and values are kept in where nothing else was said."""
KV_DTYPES: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}
"""What keys and values may be kept in, and the dtype of a `KVCache`: float32 is what the native engine computes in, and stands
for what the eager engine computes in, too."""


def known(value: str, values: Any, source: str) -> str:
    """A name out of several. ValueError for any other text. source: where it was read, for the error."""
    if value not in values:
        raise ValueError(f"{source} must be one of {', '.join(values)}, found {value!r}")
    return value


@dataclass(frozen=True)
class EngineOptions:
    """What is asked of a model's engine; None says nothing.

    engine: one of ENGINES. quantize: "none", "int8" or "int4", what the native engine quantises the weights to.
    kv_dtype: "float32" or "bfloat16", what keys and values are kept in. keep_weights: False gives the model's own weights
    up once the native engine has its copy. ValueError for any other text.
    """

    engine: str | None = None
    quantize: str | None = None
    kv_dtype: str | None = None
    keep_weights: bool | None = None

    def __post_init__(self) -> None:
        for name, values in (("engine", ENGINES), ("quantize", QUANTIZED), ("kv_dtype", KV_DTYPES)):
            if (value := getattr(self, name)) is not None:
                known(value, values, name)

    def over(self, other: "EngineOptions") -> "EngineOptions":
        """This setup, and another one's where this says nothing."""
        pairs = ((getattr(self, one.name), getattr(other, one.name)) for one in fields(self))
        return EngineOptions(*(theirs if own is None else own for own, theirs in pairs))

    @property
    def quantizes(self) -> bool:
        return self.quantize not in (None, "none")


_ATTACHED: WeakKeyDictionary[Any, EngineOptions] = WeakKeyDictionary()


class _EngineCache:
    """The engines of a model, as they were asked for, while its facts hold. chosen: by engine and quantize."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.chosen: dict[tuple[str | None, str | None], tuple[Engine, str | None]] = {}


_MADE: PerModelCache[_EngineCache] = PerModelCache()


def attach(
    model: Any,
    engine: str | None = None,
    quantize: str | None = None,
    kv_dtype: str | None = None,
    keep_weights: bool | None = None,
) -> None:
    """Remember what was asked of a model's engine, for as long as it lives. None leaves what was said before."""
    inner = unwrapped(model)
    _ATTACHED[inner] = EngineOptions(engine, quantize, kv_dtype, keep_weights).over(_ATTACHED.get(inner, EngineOptions()))


def attached(model: Any) -> EngineOptions:
    """What `load`, `enable` or `attach` was told for a model."""
    return _ATTACHED.get(unwrapped(model), EngineOptions())


def asked_for(model: Any, engine: str | None, quantize: str | None, kv_dtype: str | None) -> EngineOptions:
    """All that is asked of a model's engine: what is given, or what was attached to the model, or what the environment says, or
    "auto", "none" and "float32". ValueError for a name that is none."""
    asked = EngineOptions(engine, quantize, kv_dtype).over(attached(model))
    if asked.engine is None:
        asked = asked.over(EngineOptions(known(os.environ.get(VARIABLE) or "auto", ENGINES, VARIABLE)))
    if asked.kv_dtype is None:
        asked = asked.over(EngineOptions(kv_dtype=known(os.environ.get(KV_VARIABLE) or "float32", KV_DTYPES, KV_VARIABLE)))
    return asked.over(EngineOptions(quantize="none"))


def kv_dtype_of(asked: EngineOptions) -> torch.dtype | None:
    """The dtype of a `KVCache`; None for what is computed in."""
    return KV_DTYPES[asked.kv_dtype or "float32"]


def choose(asked: EngineOptions, model: Any, facts: Facts, version: int | None) -> tuple[Engine, str | None]:
    """The engine of a model, made once, and the reason why it is not the native one where "auto" had to do without. version: of
    the weights that it is to compute with (`Engine.is_current`).

    ValueError where the native engine cannot run the model although it was asked for, by its name or by quantised weights,
    which no other engine has.
    """
    made = _MADE.get(model, None, lambda: _EngineCache(facts), lambda made: made.facts is facts)
    key = asked.engine, asked.quantize
    found = made.chosen.get(key)
    if found is None or found[1] is not None or not found[0].is_current(version):  # what kept native away may be gone
        found = made.chosen[key] = _choice(asked, model, facts, version)
    return found


def missing_room_for_copy(model: Any, quantize: str) -> str | None:
    """Why there is no room for a copy of the weights in fewer bits, with the copies that there are; None if there is."""
    made = _MADE.known(model).values()
    kinds = {quantize} | {engine.quantize for one in made for engine, _ in one.chosen.values() if engine.quantize is not None}
    needed = sum(quantised_bytes(model, kind) for kind in kinds)
    limit = int(WEIGHT_COPIES_SHARE * device_memory_bytes(CPU))
    if needed <= limit:
        return None
    return (
        f"draft_quantize={quantize} needs {needed} bytes for the copies of the weights in {' and '.join(sorted(kinds))}, and "
        f"{limit} are allowed: draft without draft_quantize, or load the model with quantize"
    )


def _choice(asked: EngineOptions, model: Any, facts: Facts, version: int | None) -> tuple[Engine, str | None]:
    if asked.engine in ("eager", "compiled"):
        if asked.quantizes:
            raise ValueError(
                f"quantize={asked.quantize!r}, asked for now or when the model was loaded, needs the native engine, "
                f"found engine={asked.engine!r}"
            )
        return (EagerEngine if asked.engine == "eager" else CompiledEngine)(model, facts), None
    reason = why_not(model, facts)
    if asked.engine == "native":
        if reason is not None:
            raise ValueError(f"engine='native' cannot run this model: {reason}; take engine='auto' or 'eager'")
        return NativeEngine(model, facts, asked.quantize if asked.quantizes else None, asked.keep_weights is not False), None
    if reason is None:
        return choose(EngineOptions("native").over(asked), model, facts, version)
    if asked.quantizes:
        raise ValueError(f"quantize={asked.quantize!r} needs the native engine, which cannot run this model: {reason}")
    return choose(EngineOptions("eager").over(asked), model, facts, version)[0], reason
