"""What methods learn across requests, each state as long as its model lives: one for every place, batch size and choice of
settings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from skipstone.decoding.method import Method
from skipstone.models.layered import LayeredModel, unwrapped


class State(Protocol):
    """steps: that it has learnt from."""

    steps: int

    def report(self) -> dict[str, Any]:
        """What there is to say, as plain JSON values."""
        ...


S = TypeVar("S", bound=State)
_STATES: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
_LOCK = threading.Lock()


def of(method: Method, model: LayeredModel, rows: int, more: Any, make: Callable[[], S]) -> S:
    """The state of a method on a model, where it is now, for a batch of so many rows: the same one for every request, as long
    as the model lives. more: what else tells two states apart."""
    states = _STATES.setdefault(model.model, {})
    key = (method, rows, str(model.device), str(model.dtype), more)
    with _LOCK:
        if key not in states:
            states[key] = make()
        return states[key]


def known(method: Method, more: Any, model: Any) -> dict[str, Any]:
    """What there is to say of a method's busiest state on a model; empty before its first request.
    more: as in `of`, None for any."""
    with _LOCK:
        states = [
            state
            for key, state in _STATES.get(unwrapped(model), {}).items()
            if key[0] == method and (more is None or key[-1] == more)
        ]
    return max(states, key=lambda state: state.steps).report() if states else {}
