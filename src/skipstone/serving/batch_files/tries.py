"""Which requests of a batch on Ray were begun. It is an actor of its own and needs no model: nothing here imports torch."""


class Tries:
    """An actor that knows which requests were begun, as those who answer them may die. A task is known by its first request."""

    def __init__(self) -> None:
        self._begun: dict[int, int] = {}  # task -> how often it was begun
        self._alone: set[int] = set()  # requests that were answered by themselves, and may have ended an actor

    def begin(self, task: int) -> int:
        """How often a task was begun, this time included."""
        self._begun[task] = self._begun.get(task, 0) + 1
        return self._begun[task]

    def alone(self, index: int) -> bool:
        """Whether a request may be answered by itself: it was not begun so before without an end."""
        if index in self._alone:
            return False
        self._alone.add(index)
        return True

    def ended(self, index: int) -> None:
        """A request that was answered by itself has ended no actor."""
        self._alone.discard(index)
