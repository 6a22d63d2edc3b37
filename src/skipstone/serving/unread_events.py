"""Events that clients have not read yet. Their total size is limited, so that a client that never reads cannot fill the
memory."""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from weakref import WeakSet

from skipstone.serving.pending_request import CANCELLED, PendingRequest, RequestEnd, RequestEvent, StepOutput, merge_outputs
from skipstone.utils.limits import UNREAD_BYTES

READ_TOO_SLOWLY = "the answer was written faster than it was read, and no more of it is kept: read faster, or ask for less"
STEP_BYTES, TOKEN_BYTES, TOP_LOGPROB_BYTES, TOKEN_DETAILS_BYTES = 600, 100, 120, 130
"""Approximate sizes of a step, one of its tokens, one reported log-probability, and one token of the details."""

logger = logging.getLogger(__name__)


class UnreadEvents:
    """The unread events of one answer, in order. nbytes: their approximate size."""

    def __init__(self, requests: Iterable[PendingRequest]) -> None:
        self.requests = tuple(requests)
        self._events: deque[tuple[PendingRequest, RequestEvent]] = deque()
        self.nbytes = 0
        self._arrived = asyncio.Event()

    def put(self, pending: PendingRequest, event: RequestEvent) -> None:
        self._events.append((pending, event))
        self.nbytes += event_bytes(event)
        self._arrived.set()

    async def take(self, *, whole_steps: bool) -> tuple[PendingRequest, RequestEvent]:
        """Wait for the next event. whole_steps: whether every step is an event of its own."""
        while not self._events:
            self._arrived.clear()
            await self._arrived.wait()
        if not whole_steps and len(self._events) > 1:
            self._replace(merge_outputs(self._events))
        pending, event = self._events.popleft()
        self.nbytes -= event_bytes(event)
        return pending, event

    def drop(self) -> None:
        """Replace what is not read by an error."""
        self._replace((pending, RequestEnd(CANCELLED, READ_TOO_SLOWLY, 503)) for pending in self.requests)
        self._arrived.set()

    def _replace(self, events: Iterable[tuple[PendingRequest, RequestEvent]]) -> None:
        self._events = deque(events)
        self.nbytes = sum(event_bytes(event) for _, event in self._events)


def largest_beyond_limit(unread: WeakSet[UnreadEvents]) -> UnreadEvents | None:
    """The answer with the most unread bytes if the total exceeds the limit, else None."""
    total = sum(one.nbytes for one in unread)
    if total <= UNREAD_BYTES:
        return None
    found = max(unread, key=lambda one: one.nbytes)
    message = "clients have left %d bytes of their answers unread, %d are allowed: the answer with the most, %d, is dropped"
    logger.warning(message, total, UNREAD_BYTES, found.nbytes)
    return found


def event_bytes(event: RequestEvent) -> int:
    """Approximate size of an event."""
    if not isinstance(event, StepOutput):
        return STEP_BYTES
    found = STEP_BYTES + TOKEN_BYTES * len(event.tokens)
    found += sum(TOP_LOGPROB_BYTES * (1 + len(one.top)) for one in event.logprobs or ())
    if (details := event.details) is not None:
        found += TOKEN_DETAILS_BYTES * (len(details.tokens) + sum(1 + len(branch.tokens) for branch in details.rejected))
    return found
