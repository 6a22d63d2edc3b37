"""How often each request of a batch on Ray was begun. Nothing here imports torch: this actor needs no model."""

from collections import Counter


class Attempts:
    """An actor that outlives those who answer. A task is known by the number of its first request."""

    def __init__(self) -> None:
        self._begun: Counter[int] = Counter()  # task -> number of attempts
        self._alone: set[int] = set()  # requests that are answered alone, or have ended an actor

    def begin(self, task: int) -> int:
        """The number of attempts at a task, this one included."""
        self._begun[task] += 1
        return self._begun[task]

    def begin_alone(self, index: int) -> bool:
        """Whether a request may be answered alone. It may not if it has ended an actor that way."""
        is_new = index not in self._alone
        self._alone.add(index)
        return is_new

    def end_alone(self, index: int) -> None:
        """A request that was answered alone has ended no actor."""
        self._alone.discard(index)
