"""Whether other programs disturb a measurement."""

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Self

MAX_WAITED_SHARE = 0.1  # of its time that a process waits for a processor on an idle machine


class ProcessorWatch:
    """How long the threads of this process waited for a processor that another process used, in `with` blocks.

    waited_share: of the time that they ran or waited in all blocks. It is at most the share of the processors' time that other
    processes used, because threads of one process wait for each other, too. None on systems other than Linux. The system counts
    in ticks of 10 ms, so the share means little for less than .2 s.
    """

    waited_share: float | None = None

    def __init__(self) -> None:
        self._ran = self._waited = self._used = self._others = 0.0

    def __enter__(self) -> Self:
        self._threads, self._machine, self._own = _thread_seconds(), machine_seconds(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        machine, own = machine_seconds(), time.process_time() - self._own
        for thread, seconds in _thread_seconds().items():
            before = self._threads.get(thread, (0.0, 0.0))
            self._ran, self._waited = self._ran + seconds[0] - before[0], self._waited + seconds[1] - before[1]
        if self._ran + self._waited > 0 and machine is not None and self._machine is not None:
            self._used, self._others = self._used + own, self._others + machine - self._machine - own
            others = max(self._others, 0.0)
            self.waited_share = min(self._waited / (self._ran + self._waited), others / (others + self._used) if others else 0.0)


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
