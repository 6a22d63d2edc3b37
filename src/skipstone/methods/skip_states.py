"""The states of SWIFT, each as long as its model lives: one for every place, batch size and choice of settings."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from skipstone.core.model import LayeredModel, unwrapped
from skipstone.methods import profiles
from skipstone.methods.skip_state import SkipState

if TYPE_CHECKING:
    from skipstone.methods.swift import Swift

_STATES: WeakKeyDictionary[Any, dict[Any, SkipState]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def of(method: Swift, model: LayeredModel, rows: int) -> SkipState:
    """The state of a method on a model, where it is now, for a batch of so many rows: the same one for every request, as long
    as the model lives."""
    skip = None if method.profile is None else profiles.load(method.profile, model.model).skip
    states = _STATES.setdefault(model.model, {})
    key = (method, rows, str(model.device), str(model.dtype), skip)
    with _LOCK:
        if key not in states:
            states[key] = SkipState(method, model, skip, rows)
        return states[key]


def known(method: Swift, model: Any) -> dict[str, Any]:
    """What there is to say of a method's busiest state on a model; empty before its first request."""
    with _LOCK:
        states = [state for key, state in _STATES.get(unwrapped(model), {}).items() if key[0] == method]
    return max(states, key=lambda state: state.steps).report() if states else {}
