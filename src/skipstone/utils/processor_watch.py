"""Whether other programs disturb a measurement."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

MAX_WAITED_SHARE = 0.1  # of its time that a process waits for a processor on an idle machine
MIN_SECONDS = 0.2  # of the threads, for which a share of ticks of 10 ms says something


class ProcessorWatch:
    """How long the threads of this process waited for a processor that another process used, in `with` blocks.

    others: watches with blocks that count, too.
    """

    def __init__(self, *others: "ProcessorWatch") -> None:
        self._ran_seconds: float = sum(one._ran_seconds for one in others)
        self._waited_seconds: float = sum(one._waited_seconds for one in others)
        self._own_seconds: float = sum(one._own_seconds for one in others)
        self._machine_seconds: float | None = sum(one._machine_seconds or 0.0 for one in others)

    def __enter__(self) -> Self:
        self._threads, self._machine, self._own = _thread_seconds(), machine_seconds(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        machine = machine_seconds()
        self._own_seconds += time.process_time() - self._own
        for thread, (ran, waited) in _thread_seconds().items():
            ran_before, waited_before = self._threads.get(thread, (0.0, 0.0))
            self._ran_seconds += ran - ran_before
            self._waited_seconds += waited - waited_before
        if machine is None or self._machine is None or self._machine_seconds is None:
            self._machine_seconds = None
        else:
            self._machine_seconds += machine - self._machine

    @property
    def waited_share(self) -> float | None:
        """Share of the time that the threads ran or waited in all blocks.

        It is at most the share of the processors' time that other processes used, because threads of one process wait for each
        other, too. None on systems other than Linux, and for less than MIN_SECONDS: the system counts in ticks of 10 ms.
        """
        total = self._ran_seconds + self._waited_seconds
        if total <= MIN_SECONDS or self._machine_seconds is None:
            return None
        other_seconds = max(self._machine_seconds - self._own_seconds, 0.0)
        return min(self._waited_seconds / total, other_seconds / (other_seconds + self._own_seconds or 1.0))


def was_busy(waited_share: float | None) -> bool:
    """Whether other programs disturbed a measurement."""
    return waited_share is not None and waited_share > MAX_WAITED_SHARE


def busy_warning(*waited_shares: float | None) -> str | None:
    """A warning for figures that were measured on a busy machine; None if it was idle."""
    share = max((share for share in waited_shares if share is not None), default=None)
    if share is None or not was_busy(share):
        return None
    waited = f"this process waited {100 * share:.0f} % of the time for a processor"
    return f"the machine was busy: {waited}, so the speeds mean little; measure again on an idle machine"


def _thread_seconds() -> dict[str, tuple[float, float]]:
    """Seconds that every thread of this process has run, and has waited for a processor."""
    found = {}
    for file in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that ends meanwhile
            ran, waited, _ = file.read_text().split()
            found[file.parent.name] = int(ran) / 1e9, int(waited) / 1e9
    return found


def machine_seconds() -> float | None:
    """Seconds that all processors of this machine have worked; None if the system does not tell."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0]
    except OSError:
        return None
    user, nice, system, _, _, interrupts, soft, stolen = map(int, first.split()[1:9])
    return (user + nice + system + interrupts + soft + stolen) / os.sysconf("SC_CLK_TCK")
