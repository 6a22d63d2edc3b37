"""State that methods keep across requests, as long as the model exists."""

import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from skipstone.engines.model_runner import ModelRunner, unwrapped
from skipstone.models.per_model_cache import PerModelCache
from skipstone.utils.limits import MAX_METHOD_STATES, METHOD_STATE_BYTES


class MethodState(Protocol):
    """What a method has learnt on one model, from `steps` steps."""

    steps: int

    @property
    def nbytes(self) -> int:
        """Approximate size in memory."""
        ...

    def report(self) -> dict[str, Any]:
        """Figures for users, as plain JSON values."""
        ...


logger = logging.getLogger(__name__)
S = TypeVar("S", bound=MethodState)
_STATES: PerModelCache[Any] = PerModelCache(MAX_METHOD_STATES, METHOD_STATE_BYTES, lambda state: state.nbytes)
"""Limited, because every combination of settings has a state, and clients of a server may choose many."""


def method_state(method: Any, model: ModelRunner, rows: int, more: Any, make: Callable[[], S]) -> S:
    """The state of a method on a model, for its present device, dtype and engine and a batch of `rows` rows.

    more: distinguishes further states. With and without `guard` a method has the same state."""
    engine = model.engine.name, model.engine.quantize, model.engine.compute_dtype
    return _STATES.get(model.model, (method.unguarded, rows, str(model.device), str(model.dtype), engine, more), make)


def known_state(method: Any, more: Any, model: Any) -> Any:
    """The method's state with most steps on a model; None before its first request.

    more: as in `method_state`, None for any."""
    known = list(_STATES.known(unwrapped(model)).items())  # another thread may add one
    states = [state for key, state in known if key[0] == method.unguarded and (more is None or key[-1] == more)]
    return max(states, key=lambda state: state.steps, default=None)


def forget_states(model: Any) -> None:
    """Forget what all methods have learnt on a model. Call it while no request runs."""
    _STATES.forget(unwrapped(model))


def method_report(method: Any, more: Any, model: Any) -> dict[str, Any]:
    """The report of `known_state`; empty without one."""
    state = known_state(method, more, model)
    return {} if state is None else state.report()


def save_learned(model: ModelRunner) -> None:
    """Save what all methods have learnt about a model for later processes. A failure is logged. Call it while no request
    runs."""
    for method in dict.fromkeys(key[0] for key in list(_STATES.known(model.model))):
        try:
            method.save_learned(model)
        except Exception as error:
            logger.warning("what %s has learnt was not saved: %s", method.name, error)
