"""Makes copies of weights in fewer bits in a thread of its own, while no request runs.

The thread has the lowest priority, and works on small pieces. Between two pieces it waits for the end of running requests. The
copy is a candidate of `auto` once it is whole. If the model came from files, the copy is written to the disk's cache.
"""

import atexit
import logging
import os
import sys
import threading
from contextlib import suppress

from skipstone.engines.choose_engine import missing_room_for_copy
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.per_model_cache import PerModelCache

WAIT_SECONDS = 0.25
"""Time between two looks whether requests have ended."""
LOWEST_NICENESS = 19

logger = logging.getLogger(__name__)


class CopyThread(threading.Thread):
    """Makes one copy. max_bytes: as in `missing_room_for_copy`."""

    def __init__(self, model: ModelRunner, quantize: str, max_bytes: int | None) -> None:
        super().__init__(name="skipstone-copy", daemon=True)
        self._model, self._quantize, self._max_bytes = model, quantize, max_bytes
        self._stopped = threading.Event()
        atexit.register(self.stop)

    def run(self) -> None:
        take_lowest_priority()
        try:
            self._make()
        except Exception as error:
            logger.warning("no copy in %s was made for drafting: %s", self._quantize, error)
        finally:
            del self._model  # it may be freed
            atexit.unregister(self.stop)

    def _make(self) -> None:
        self._pause()
        model, quantize = self._model, self._quantize
        if model.has_copy(quantize) or model.map_copy(quantize):
            return
        if (reason := missing_room_for_copy(model.model, quantize, self._max_bytes)) is not None:
            logger.info("no copy for drafting: %s", reason)
            return
        engine = model.make_copy(quantize, self._pause)
        try:
            engine.cache_panels(model.model, lambda _: self._pause())
        except ValueError as error:
            logger.warning("the copy in %s is not in the disk's cache: %s", quantize, error)

    def _pause(self) -> None:
        """Wait while requests run. SystemExit, which ends a thread quietly, at the end of the process."""
        while not self._stopped.is_set() and self._model.lock.has_running_requests:
            self._stopped.wait(WAIT_SECONDS)
        if self._stopped.is_set():
            raise SystemExit

    def stop(self) -> None:
        """End after the current piece. A thread that outlived the interpreter would read memory that is freed."""
        self._stopped.set()
        self.join()


def take_lowest_priority() -> None:
    """Let this thread run only on idle processors, where the system can do so for a single thread."""
    with suppress(AttributeError, OSError):  # other systems than Linux, or a sandbox
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        return
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST_NICENESS)


_THREADS: PerModelCache[CopyThread] = PerModelCache()
"""The latest thread for each model and quantisation."""


def make_in_background(model: ModelRunner, quantize: str, max_bytes: int | None = None) -> CopyThread:
    """The thread that makes a copy of a model's weights. It is started if none runs and there is no copy."""

    def start() -> CopyThread:
        thread = CopyThread(model, quantize, max_bytes)
        thread.start()
        return thread

    return _THREADS.get(model.model, quantize, start, lambda thread: thread.is_alive() or model.has_copy(quantize))


def is_interactive() -> bool:
    """Whether somebody types Python here, as in a notebook."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules
