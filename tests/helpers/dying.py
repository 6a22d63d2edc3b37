"""`python -m tests.helpers.dying`: skipstone's command line, in which a model's thread dies at its next turn after SIGUSR1."""

import signal
import threading

from skipstone.cli import main
from skipstone.serving.scheduler import Scheduler


class Planted(BaseException):
    """What nobody catches."""


def plant(now: threading.Event) -> None:
    own = Scheduler.expire_requests

    def expire(scheduler: Scheduler) -> None:
        if now.is_set():
            raise Planted("planted")
        own(scheduler)

    Scheduler.expire_requests = expire  # type: ignore[method-assign]


if __name__ == "__main__":
    death = threading.Event()
    plant(death)
    signal.signal(signal.SIGUSR1, lambda *_: death.set())
    main()
