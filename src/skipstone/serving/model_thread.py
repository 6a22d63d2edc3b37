"""The thread that runs the model. Everything that touches the model happens in it: other threads submit requests and get
events."""

import logging
import queue
import threading
import time
from collections.abc import Callable

from skipstone.decoding.draft import Step
from skipstone.decoding.method_states import save_learned
from skipstone.engines.model_runner import ModelRunner
from skipstone.serving.admission import AdmissionLimits
from skipstone.serving.errors import RequestError
from skipstone.serving.pending_request import CANCELLED, FAILED, PendingRequest, RequestEnd, RequestEvent
from skipstone.serving.scheduler import Scheduler

POST_INTERVAL_SECONDS = 0.010
"""Time between two lists of events, which readers do not notice. Every list costs the interpreter's lock, and the next step of
a small model waits for it. First tokens and ends of texts are posted at once."""
IDLE_SECONDS = 10.0
"""Time without requests after which what was learnt is saved."""
THREAD_FAILED = "the model's thread has ended by an error: see the server's log"
"""The answer to every request after that."""

RequestEvents = list[tuple[PendingRequest, RequestEvent]]
MethodSteps = list[tuple[str, Step]]
"""Steps, each with the name of its method."""
Post = Callable[[RequestEvents, MethodSteps], None]
"""Called in the model's thread with the events and steps since the last call, and once more if the thread ends by an error."""

logger = logging.getLogger(__name__)


class ModelThread:
    """Writes the texts of requests. post: receives the events."""

    def __init__(self, model: ModelRunner, limits: AdmissionLimits, post: Post) -> None:
        self.scheduler = Scheduler(model, limits, self._send)
        self._post = post
        self._inbox: queue.SimpleQueue[PendingRequest | Callable[[], None]] = queue.SimpleQueue()
        self._events: RequestEvents = []  # not posted yet
        self._steps: MethodSteps = []  # not posted yet
        self._last_post = 0.0  # in seconds of `time.monotonic`
        self._is_urgent = False  # whether the next events are posted at once
        self._is_saved = True  # what was learnt
        self._draining = self._stopped = False
        self.is_alive = True  # until the thread ends by an error
        self._thread = threading.Thread(target=self._run_until_failure, name="skipstone-model", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ from any thread

    def submit(self, requests: list[PendingRequest]) -> None:
        """Take requests, all or none. RequestError if the queue is full or the server stops."""
        with self.scheduler.lock:
            if not self.is_alive:
                raise RequestError(503, THREAD_FAILED)
            if self._draining:
                raise RequestError(503, "the server is shutting down")
            self.scheduler.register(requests)
            for pending in requests:  # with the lock, so that a thread that fails finds all requests that were taken
                pending.arrival_time = time.monotonic()
                self._inbox.put(pending)

    def cancel(self, pending: PendingRequest) -> None:
        """End a request that nobody reads, before the next step."""
        self._inbox.put(lambda: self.scheduler.end_request(pending, RequestEnd(CANCELLED)))

    def stop(self, seconds: float = 0.0) -> bool:
        """Take no more requests, give the others some seconds to end, and end the thread. Returns whether all have ended."""
        with self.scheduler.lock:
            self._draining = True
        end = time.monotonic() + seconds
        while self.scheduler.num_open and time.monotonic() < end and self._thread.is_alive():
            time.sleep(0.02)
        all_ended = not self.scheduler.num_open
        self._inbox.put(self._end)
        self._thread.join(timeout=30)
        return all_ended

    # ---------------------------------------------------------------------------------------------- in the model's thread

    def _end(self) -> None:
        self._stopped = True

    def _run_until_failure(self) -> None:
        """Run. An error that escapes ends the thread: all requests fail, and no further ones are taken."""
        try:
            self._run()
        except BaseException:
            logger.exception("the model's thread has ended by an error: nothing is written any more")
            with self.scheduler.lock:
                self.is_alive = False
            self._receive(wait=False, calls=False)
            for pending in self.scheduler.requests:
                self._send(pending, RequestEnd(FAILED, THREAD_FAILED))
            self.scheduler.num_waiting = 0
            self._post(self._events, self._steps)

    def _run(self) -> None:
        while not self._stopped:
            is_idle = self.scheduler.is_idle
            self._is_urgent |= is_idle
            self._post_events()
            self._receive(wait=is_idle)
            self._steps.extend(self.scheduler.run_steps())
        for pending in self.scheduler.requests:
            self._send(pending, RequestEnd(CANCELLED, "the server was stopped", 503))
        self._post_events()
        save_learned(self.scheduler.model)

    def _receive(self, wait: bool, calls: bool = True) -> None:
        """Take what came in since the last step. wait: for the first item. calls: whether functions in the inbox are called."""
        while True:
            try:
                item = self._inbox.get(block=wait, timeout=None if self._is_saved else IDLE_SECONDS)
            except queue.Empty:
                if not wait:
                    return
                save_learned(self.scheduler.model)
                self._is_saved = True
                continue
            wait = False
            if isinstance(item, PendingRequest):
                self._is_saved = False
                self.scheduler.waiting.append(item)
            elif calls:
                item()

    def _send(self, pending: PendingRequest, event: RequestEvent) -> None:
        if isinstance(event, RequestEnd):
            with self.scheduler.lock:
                self.scheduler.num_open -= 1
        self._is_urgent |= isinstance(event, RequestEnd) or event.step == 0
        self._events.append((pending, event))

    def _post_events(self) -> None:
        """Post the events since the last post, if it is time."""
        now = time.monotonic()
        if not (self._is_urgent or now - self._last_post >= POST_INTERVAL_SECONDS):
            return
        events, steps, self._events, self._steps = self._events, self._steps, [], []
        self._last_post, self._is_urgent = now, False
        if events or steps:
            self._post(events, steps)
