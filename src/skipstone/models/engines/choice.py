"""Which engine runs a model: what the user asked for, and what can run it."""

import os
from typing import Any
from weakref import WeakKeyDictionary

from skipstone.models.engines.eager.eager import EagerEngine
from skipstone.models.engines.engine import ENGINES, QUANTIZED, Engine
from skipstone.models.engines.native.engine import NativeEngine, why_not
from skipstone.models.facts import Facts
from skipstone.models.memo import Memo
from skipstone.models.modules import unwrapped

VARIABLE = "SKIPSTONE_ENGINE"
"""The environment variable that says which engine runs the models of which nothing else was said."""

_ATTACHED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_QUANTIZED: WeakKeyDictionary[Any, str] = WeakKeyDictionary()


class _Made:
    """The engines of a model, as they were asked for, while its facts hold. chosen: by the name that was asked for, and what
    the weights are quantised to."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.chosen: dict[tuple[str, str], tuple[Engine, str | None]] = {}


_MADE: Memo[_Made] = Memo()


def known(engine: str, source: str = "engine") -> str:
    """The name of an engine. ValueError for any other text. source: where it was read, for the error."""
    if engine not in ENGINES:
        raise ValueError(f"{source} must be one of {', '.join(ENGINES)}, found {engine!r}")
    return engine


def known_quantize(quantize: str) -> str:
    """What weights are quantised to. ValueError for any other text."""
    if quantize not in QUANTIZED:
        raise ValueError(f"quantize must be one of {', '.join(QUANTIZED)}, found {quantize!r}")
    return quantize


def attach(model: Any, engine: str | None, quantize: str | None = None) -> None:
    """Remember which engine a model was asked to run on, and what its weights are quantised to, for as long as it lives. None
    leaves what was said before."""
    if engine is not None:
        _ATTACHED[unwrapped(model)] = known(engine)
    if quantize is not None:
        _QUANTIZED[unwrapped(model)] = known_quantize(quantize)


def quantize_asked_for(model: Any, quantize: str | None) -> str:
    """What to quantise to: the one given, or what was attached to the model, or "none". ValueError for another text."""
    return known_quantize(_QUANTIZED.get(unwrapped(model), "none") if quantize is None else quantize)


def asked_for(model: Any, engine: str | None) -> str:
    """The engine to ask for: the one given, or what was attached to the model, or what the environment says, or "auto".
    ValueError for a name that is none."""
    if engine is not None:
        return known(engine)
    if (attached := _ATTACHED.get(unwrapped(model))) is not None:
        return attached
    return known(os.environ.get(VARIABLE) or "auto", VARIABLE)


def choose(asked: str, quantize: str, model: Any, facts: Facts) -> tuple[Engine, str | None]:
    """The engine of a model, made once, and the reason why it is not the native one where "auto" had to do without.

    ValueError for a name that is none, and where the native engine cannot run the model although it was asked for, by its name
    or by quantised weights, which no other engine has.
    """
    made = _MADE.get(model, None, lambda: _Made(facts), lambda made: made.facts is facts)
    key = known(asked), known_quantize(quantize)
    found = made.chosen.get(key)
    if found is None or found[1] is not None or not found[0].holds():  # what kept native away may be gone
        found = made.chosen[key] = _choice(asked, quantize, model, facts)
    return found


def _choice(asked: str, quantize: str, model: Any, facts: Facts) -> tuple[Engine, str | None]:
    if asked == "eager":
        if quantize != "none":
            raise ValueError(f"quantize={quantize!r} needs the native engine, found engine='eager'")
        return EagerEngine(model, facts), None
    reason = why_not(model, facts)
    if asked == "native":
        if reason is not None:
            raise ValueError(f"engine='native' cannot run this model: {reason}; take engine='auto' or 'eager'")
        return NativeEngine(model, facts, None if quantize == "none" else quantize), None
    if reason is None:
        return choose("native", quantize, model, facts)
    if quantize != "none":
        raise ValueError(f"quantize={quantize!r} needs the native engine, which cannot run this model: {reason}")
    return choose("eager", quantize, model, facts)[0], reason
