"""What is made once per model and key, for as long as the model lives."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

V = TypeVar("V")


class PerModelCache(Generic[V]):
    """Values by model and key. A value must not refer to its model, which would then never be freed. max_values: values of a
    model, beyond which the one that was asked for longest ago goes; None for any number. max_bytes: the same for what they take
    together, as nbytes says it of each; the last one is kept in any case."""

    def __init__(
        self, max_values: int | None = None, max_bytes: int | None = None, nbytes: Callable[[V], int] = lambda _: 0
    ) -> None:
        self._most, self._max_bytes, self._nbytes = max_values, max_bytes, nbytes
        self._made: WeakKeyDictionary[Any, dict[Any, V]] = WeakKeyDictionary()

    def get(self, model: Any, key: Any, make: Callable[[], V], holds: Callable[[V], bool] | None = None) -> V:
        """The value of a key on a model. `make` makes it the first time, and again where `holds` says no of the old one."""
        made = self._made.setdefault(model, {})
        if key not in made or (holds is not None and not holds(made[key])):
            made[key] = make()
        if self._most is not None or self._max_bytes is not None:
            made[key] = made.pop(key)  # the last one now
            while len(made) > 1 and self._is_full(made):
                del made[next(iter(made))]
        return made[key]

    def _is_full(self, made: dict[Any, V]) -> bool:
        if self._most is not None and len(made) > self._most:
            return True
        return self._max_bytes is not None and sum(map(self._nbytes, made.values())) > self._max_bytes

    def known(self, model: Any) -> dict[Any, V]:
        """All values of a model by their keys."""
        return self._made.get(model, {})
