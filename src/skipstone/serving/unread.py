"""Events that clients have not read yet. Together they have a limit in bytes: one that never reads may not fill the memory."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from weakref import WeakSet

from skipstone.limits import UNREAD_BYTES
from skipstone.serving.jobs import CANCELLED, Ended, Event, Job, Piece, joined

TOO_SLOW = "the answer was written faster than it was read, and the server keeps no more of it: read faster, or ask for less"
PIECE_BYTES, TOKEN_BYTES, LIKELY_BYTES, SEEN_BYTES = 600, 100, 120, 130
"""About what a step, a token of it, one of the likeliest tokens in its place and a token in the details take as objects."""

logger = logging.getLogger(__name__)


class UnreadEvents:
    """The events of one answer, in their order. jobs: of the answer. nbytes: about what the events take."""

    def __init__(self, jobs: Iterable[Job]) -> None:
        self.jobs = tuple(jobs)
        self._events: deque[tuple[Job, Event]] = deque()
        self.nbytes = 0
        self._arrived = asyncio.Event()

    def put(self, job: Job, event: Event) -> None:
        """One more event."""
        self._events.append((job, event))
        self.nbytes += event_bytes(event)
        self._arrived.set()

    async def take(self, *, whole_steps: bool) -> tuple[Job, Event]:
        """The next event, waited for. whole_steps: whether what every step has committed is an event of its own."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        if not whole_steps and len(self._events) > 1:
            self._replace(joined(self._events))
        job, event = self._events.popleft()
        self.nbytes -= event_bytes(event)
        return job, event

    def drop(self) -> None:
        """Forget what is not read. In its place an error is read."""
        self._replace((job, Ended(CANCELLED, TOO_SLOW, 503)) for job in self.jobs)
        self._arrived.set()

    def _replace(self, events: Iterable[tuple[Job, Event]]) -> None:
        self._events = deque(events)
        self.nbytes = sum(event_bytes(event) for _, event in self._events)


def largest_beyond_limit(unread: WeakSet[UnreadEvents]) -> UnreadEvents | None:
    """The answer with the most unread bytes if all together have more than is allowed; None if they have not."""
    total = sum(one.nbytes for one in unread)
    if total <= UNREAD_BYTES:
        return None
    found = max(unread, key=lambda one: one.nbytes)
    logger.warning(
        "clients have left %d bytes of their answers unread, %d are allowed: the answer with the most, %d, is dropped",
        total,
        UNREAD_BYTES,
        found.nbytes,
    )
    return found


def event_bytes(event: Event) -> int:
    """About what an event takes."""
    if not isinstance(event, Piece):
        return PIECE_BYTES
    found = PIECE_BYTES + TOKEN_BYTES * len(event.tokens)
    found += sum(LIKELY_BYTES * (1 + len(one.top)) for one in event.likely or ())
    if (details := event.details) is not None:
        found += SEEN_BYTES * (len(details.tokens) + sum(1 + len(branch.tokens) for branch in details.refused))
    return found
