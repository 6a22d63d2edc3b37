"""Number of threads of the native engine: the user's choice, or the fastest one measured here."""

import os
import time
from collections.abc import Callable

VARIABLE = "SKIPSTONE_THREADS"
"""Environment variable for the number of threads of the native engine; measured if unset."""
MAX_THREADS = 64  # of the library
MAX_ROUNDS = 8  # trials per number of threads; the shortest counts, since other load only adds time
MIN_ROUNDS = 2  # trials per number of threads
TRIAL_SECONDS = 0.05  # no further round begins after this time
MIN_RELATIVE_SPEED = 0.9  # more threads are preferred down to this share of the best speed, as load may have slowed them


def requested_number() -> int | None:
    """The value of SKIPSTONE_THREADS, None if unset or empty. ValueError if it is no valid number."""
    value = os.environ.get(VARIABLE) or None
    if value is None:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= MAX_THREADS:
        raise ValueError(f"{VARIABLE} must be a whole number from 1 to {MAX_THREADS}, found {value!r}")
    return int(value)


def cores() -> int:
    """Number of cores that this process may use, at most MAX_THREADS."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(count, MAX_THREADS)


def fastest(run: Callable[[int], None], max_threads: int) -> int:
    """The fastest number of threads for the same work: `max_threads`, half of it, or one.

    run: does the work on a number of threads. Numbers alternate. The largest of nearly equal ones wins.
    """
    numbers = sorted({1, max(1, max_threads // 2), max_threads})
    if len(numbers) == 1:
        return max_threads
    best_seconds = dict.fromkeys(numbers, float("inf"))
    began = time.perf_counter()
    for turn in range(MAX_ROUNDS):
        if turn >= MIN_ROUNDS and time.perf_counter() - began > TRIAL_SECONDS:
            break
        for number in numbers:
            run(number)  # wakes the threads up
            awake = time.perf_counter()
            run(number)
            best_seconds[number] = min(best_seconds[number], time.perf_counter() - awake)
    best = min(best_seconds.values())
    return max(number for number in numbers if best >= MIN_RELATIVE_SPEED * best_seconds[number])
