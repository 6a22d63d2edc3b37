"""Times set-up work by name: what a call does before its first step, or once in a step, such as a copy of the weights."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

SetupSeconds = dict[str, float]
"""Name of the work -> seconds."""
REQUEST = "request"
"""The set-up work of reading a call: tokens, options, checks."""


class _CollectedSeconds(threading.local):
    seconds: SetupSeconds | None = None


_COLLECTED = _CollectedSeconds()


@contextmanager
def collect_setup_seconds(into: SetupSeconds | None = None) -> Iterator[SetupSeconds]:
    """Collect the set-up work of this thread inside the block. into: default those of the block around it, else new ones."""
    around, seconds = _COLLECTED.seconds, collected_seconds() if into is None else into
    _COLLECTED.seconds = seconds
    try:
        yield seconds
    finally:
        _COLLECTED.seconds = around


def collected_seconds() -> SetupSeconds:
    """What the block around collects, or new seconds if there is none."""
    return SetupSeconds() if _COLLECTED.seconds is None else _COLLECTED.seconds


@contextmanager
def setup_work(name: str) -> Iterator[None]:
    """Time the block as set-up work, if somebody collects it. Set-up work inside it counts under its own name only."""
    seconds = _COLLECTED.seconds
    if seconds is None:
        yield
        return
    began, inner = time.perf_counter(), sum(seconds.values())
    try:
        yield
    finally:
        add_setup_seconds(name, time.perf_counter() - began - (sum(seconds.values()) - inner))


def add_setup_seconds(name: str, spent: float) -> None:
    """Count work that has shown itself to be set-up work when it was done."""
    if (seconds := _COLLECTED.seconds) is not None:
        seconds[name] = seconds.get(name, 0.0) + spent
