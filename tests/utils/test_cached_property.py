import threading
from threading import Event

from skipstone.utils.cached_property import cached_property


class Slow:
    """Its property takes until `go` is set."""

    def __init__(self, go: Event) -> None:
        self.go, self.started, self.calls = go, Event(), 0

    @cached_property
    def value(self) -> int:
        self.calls += 1
        self.started.set()
        self.go.wait(10)
        return self.calls


def test_a_property_does_not_wait_for_that_of_another_object() -> None:
    slow, quick, done = Slow(Event()), Slow(Event()), Event()
    quick.go.set()
    threading.Thread(target=lambda: slow.value, daemon=True).start()
    assert slow.started.wait(10)

    def read() -> None:
        assert quick.value == 1
        done.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        assert done.wait(5)
    finally:
        slow.go.set()


def test_a_property_is_computed_once() -> None:
    one = Slow(Event())
    one.go.set()
    assert (one.value, one.value, one.calls) == (1, 1, 1)
