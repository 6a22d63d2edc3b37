"""Values that are made once per model and key, and live as long as the model."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

V = TypeVar("V")


class PerModelCache(Generic[V]):
    """Values by model and key. A value must not refer to its model, which would then never be freed. max_values: per model; the
    least recently used value is dropped first; None for any number. max_bytes: the same for their total size. nbytes: size of a
    value. The latest value always stays."""

    def __init__(
        self, max_values: int | None = None, max_bytes: int | None = None, nbytes: Callable[[V], int] = lambda _: 0
    ) -> None:
        self._max_values, self._max_bytes, self._nbytes = max_values, max_bytes, nbytes
        self._made: WeakKeyDictionary[Any, dict[Any, V]] = WeakKeyDictionary()

    def get(self, model: Any, key: Any, make: Callable[[], V], holds: Callable[[V], bool] | None = None) -> V:
        """The value of a key on a model. It is made again if `holds` is false for the old one."""
        made = self._made.setdefault(model, {})
        if key not in made or (holds is not None and not holds(made[key])):
            made[key] = make()
        if self._max_values is not None or self._max_bytes is not None:
            made[key] = made.pop(key)  # the latest one now
            while len(made) > 1 and self._is_full(made):
                del made[next(iter(made))]
        return made[key]

    def _is_full(self, made: dict[Any, V]) -> bool:
        if self._max_values is not None and len(made) > self._max_values:
            return True
        return self._max_bytes is not None and sum(map(self._nbytes, made.values())) > self._max_bytes

    def forget(self, model: Any) -> None:
        """Drop all values of a model."""
        self._made.pop(model, None)

    def known(self, model: Any) -> dict[Any, V]:
        """All values of a model by their keys."""
        return self._made.get(model, {})
