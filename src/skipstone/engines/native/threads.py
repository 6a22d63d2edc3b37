"""How many threads the native engine uses: what the user says, or what is fastest here."""

import os
import time
from collections.abc import Callable

VARIABLE = "SKIPSTONE_THREADS"
"""The environment variable that says how many threads the native engine uses; they are measured where it is unset."""
MOST = 64  # threads that the library takes
ROUNDS = 8  # times that every number is tried at most; the shortest counts, as whatever else runs only adds to it
FEWEST = 2  # times that every number is tried at least
ENOUGH = 0.5  # seconds after which no further round begins
WORTH = 0.9  # share of the best time within which more threads are taken: a moment's load may have cost them more


def asked() -> int | None:
    """What SKIPSTONE_THREADS says; None where it is unset or empty. ValueError for what is no number of threads."""
    said = os.environ.get(VARIABLE) or None
    if said is None:
        return None
    if not said.isdecimal() or not 1 <= int(said) <= MOST:
        raise ValueError(f"{VARIABLE} must be a whole number from 1 to {MOST}, found {said!r}")
    return int(said)


def cores() -> int:
    """The cores that this process may use, as far as the library has threads for them."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(found, MOST)


def fastest(run: Callable[[int], None], max_threads: int) -> int:
    """The number of threads that does one and the same work soonest: `max_threads`, half of it, or one.

    run: does the work on so many threads. They take turns. Of nearly equal ones the largest is taken.
    """
    numbers = sorted({1, max(1, max_threads // 2), max_threads})
    if len(numbers) == 1:
        return max_threads
    least = dict.fromkeys(numbers, float("inf"))
    began = time.perf_counter()
    for turn in range(ROUNDS):
        if turn >= FEWEST and time.perf_counter() - began > ENOUGH:
            break
        for number in numbers:
            run(number)  # wakes the threads up
            awake = time.perf_counter()
            run(number)
            least[number] = min(least[number], time.perf_counter() - awake)
    best = min(least.values())
    return max(number for number in numbers if best >= WORTH * least[number])
