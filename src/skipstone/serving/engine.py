"""The model's thread: a bounded queue of jobs, rows that join and leave between steps.

Everything that touches the model happens in this one thread. Others put jobs into a queue and are told events, many at once.
"""

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from skipstone.decoding.draft import Step
from skipstone.decoding.method import Method
from skipstone.limits import KV_CACHE_SHARE, MAX_BATCH_GROUPS, device_memory_bytes
from skipstone.models.layered import LayeredModel
from skipstone.serving.jobs import CANCELLED, FAILED, LENGTH, TIMEOUT, Ended, Event, Job, Refused
from skipstone.serving.lanes import Lane, length_of, row_bytes
from skipstone.serving.reading import Reading

CHUNK = 256
"""Prompt tokens that a row runs between two decoding steps of the others."""
POSTED_EVERY = 0.010
"""Seconds between two lists of events. Readers see no difference. Every list costs another thread some of the interpreter's
time, and the next step of a small model waits for it. First tokens and ends of texts are told at once."""
RETRY_AFTER = 1
"""Seconds after which a client may ask again if the queue is full."""
DIED = "the model's thread has ended by an error: see the server's log"
"""The answer to every request after that."""

ACCELERATOR_ERROR: Any = getattr(torch, "AcceleratorError", ())  # torch has it from 2.8 on
MOST_FAILURES = 2
"""Consecutive errors of the device, without a successful step between them, after which the model's thread ends. A broken CUDA
context stays broken, and only another process gets a new one."""

Told = list[tuple[Job, Event]]
Steps = list[tuple[str, Step]]
"""Steps, each with the name of the method that took it."""
Post = Callable[[Told, Steps], None]
"""Called in the model's thread with the events of some steps and the steps, and once more if that thread ends by an error."""

logger = logging.getLogger(__name__)


class DeviceFailed(Exception):
    """The device gives nothing but errors."""


class Engine:
    """Writes texts.

    rows: of every method. capacity: most tokens of a text, its prompt included. waiting: most jobs that wait for a row. post:
    receives the events. chunk: as CHUNK. kv_cache_bytes: limit of the keys and values of all methods together; None for a share
    of the device's memory.
    """

    def __init__(
        self,
        model: LayeredModel,
        rows: int,
        capacity: int,
        waiting: int,
        post: Post,
        chunk: int = CHUNK,
        kv_cache_bytes: int | None = None,
    ) -> None:
        self.model, self.rows, self.capacity, self.most_waiting, self.chunk = model, rows, capacity, waiting, chunk
        self.kv_cache_bytes = default_kv_cache_bytes(model) if kv_cache_bytes is None else kv_cache_bytes
        self._post = post
        self._inbox: queue.SimpleQueue[Job | Callable[[], None]] = queue.SimpleQueue()
        self._waiting: deque[Job] = deque()
        self._lanes: dict[str, Lane] = {}
        self._reading: Reading | None = None  # of a prompt that waits
        self._reading_bytes = 0  # that it takes at most
        self._reading_waits = False  # whether a prompt waits for memory to be read in
        self._told: Told = []
        self._steps: Steps = []  # not posted yet
        self._failures = 0  # errors of the device since a step has worked
        self._posted = 0.0  # time of the latest post, in seconds of the monotonic clock
        self._urgent = False  # whether the next events are posted at once
        self._open = 0  # jobs that have not ended
        self._waits = 0  # of these, those without a row
        self._lock = threading.Lock()
        self._draining = self._stopped = False
        self.lives = True  # until its thread ends by an error
        self._thread = threading.Thread(target=self._live, name="skipstone-model", daemon=True)
        self._thread.start()

    # ------------------------------------------------------------------------------------------------ from any thread

    @property
    def running(self) -> int:
        """Jobs that have a row."""
        return self._open - self._waits

    @property
    def waits(self) -> int:
        """Jobs that wait for a row."""
        return self._waits

    def submit(self, jobs: list[Job]) -> None:
        """Take jobs, all or none. Refused if the queue is full or the server is about to stop."""
        with self._lock:
            if not self.lives:
                raise Refused(503, DIED)
            if self._draining:
                raise Refused(503, "the server is shutting down")
            if self._waits + len(jobs) > self.most_waiting + max(self.rows - self.running, 0):
                raise Refused(429, f"{self._waits} requests are waiting already; ask again later", RETRY_AFTER)
            self._open += len(jobs)
            self._waits += len(jobs)
            for job in jobs:  # with the lock: a thread that dies finds all jobs that were taken
                job.asked = time.monotonic()
                self._inbox.put(job)

    def cancel(self, job: Job) -> None:
        """Give up a job that nobody reads. Its row is free before the next step. A job that has ended stays as it is."""
        self._inbox.put(lambda: self._give_up(job, Ended(CANCELLED)))

    def stop(self, seconds: float = 0.0) -> bool:
        """Take no more jobs, give the others some seconds to end, and end the thread. Returns whether all jobs have ended."""
        with self._lock:
            self._draining = True
        end = time.monotonic() + seconds
        while self._open and time.monotonic() < end and self._thread.is_alive():
            time.sleep(0.02)
        whole = not self._open
        self._inbox.put(self._end)
        self._thread.join(timeout=30)
        return whole

    # ---------------------------------------------------------------------------------------------- in the model's thread

    def _end(self) -> None:
        self._stopped = True

    def _live(self) -> None:
        """The thread's work. An error that escapes ends it: all jobs fail, and no further ones are taken."""
        try:
            self._run()
        except BaseException:
            logger.exception("the model's thread has ended by an error: nothing is written any more")
            with self._lock:
                self.lives = False
            self._receive(wait=False, calls=False)
            for job in self._all():
                self._tell(job, Ended(FAILED, DIED))
            self._waits = 0
            self._post(self._told, self._steps)

    def _all(self) -> list[Job]:
        """Jobs that wait or have a row."""
        return [*self._waiting, *(job for lane in self._lanes.values() for job in lane.jobs if job is not None)]

    def _run(self) -> None:
        while not self._stopped:
            idle = not (self._waiting or any(lane.busy for lane in self._lanes.values()))
            self._urgent |= idle
            self._tell_all()
            self._receive(wait=idle)
            self._expire()
            self._read()
            self._end_read()
            self._admit()
            for lane in list(self._lanes.values()):
                if lane.busy and (step := self._step(lane)) is not None:
                    self._steps.append((lane.method.name, step))
        for job in self._all():
            self._tell(job, Ended(CANCELLED, "the server was stopped", 503))
        self._tell_all()

    def _receive(self, wait: bool, calls: bool = True) -> None:
        """Take what came in since the last step. wait: for the first item. calls: whether functions in the inbox are called."""
        while True:
            try:
                item = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            if isinstance(item, Job):
                self._waiting.append(item)
            elif calls:
                item()

    def _tell(self, job: Job, event: Event) -> None:
        if isinstance(event, Ended):
            with self._lock:
                self._open -= 1
        self._urgent |= isinstance(event, Ended) or event.step == 0
        self._told.append((job, event))

    def _tell_all(self) -> None:
        """Post the events since the latest post, if it is time."""
        now = time.monotonic()
        if not (self._urgent or now - self._posted >= POSTED_EVERY):
            return
        told, steps, self._told, self._steps = self._told, self._steps, [], []
        self._posted, self._urgent = now, False
        if told or steps:
            self._post(told, steps)

    def _expire(self) -> None:
        """Give up jobs that have no time left."""
        now = time.monotonic()
        for job in self._all():
            if job.seconds is not None and now - job.asked > job.seconds:
                self._give_up(job, Ended(TIMEOUT, f"the request took longer than {job.seconds:g} s", 504))

    def _give_up(self, job: Job, ended: Ended) -> None:
        if job in self._waiting:
            self._unqueue(job)
            self._tell(job, ended)
            return
        for lane in self._lanes.values():
            if job in lane.jobs:
                lane.drop(job)
                self._tell(job, ended)

    def _read(self) -> None:
        """Look at one part of the first prompt that waits for it. What was read takes memory until its text has ended, so only
        one text waits with it for a row."""
        self._reading_waits = False
        held = any(job.writes and job.read and not job.unread for job in self._waiting)
        job = next((job for job in self._waiting if job.unread and not (held and job.writes)), None)
        reading = None if job is None else self._reading_of(job)
        self._reading = reading
        if job is None or reading is None:
            return
        try:
            reading.go_on(self.model, self.chunk)
        except Exception as error:
            logger.exception("a prompt could not be read")
            self._fail(job, Ended(FAILED, "the prompt could not be read: see the server's log"))
            self._count(error)
        if not job.unread:
            self._reading = None

    def _reading_of(self, job: Job) -> Reading | None:
        """What reads the prompt of a job; None while there is no memory for it, and where there never is: the job has ended."""
        assert job.read is not None
        if self._reading is not None and self._reading.likely is job.read:
            return self._reading
        self._reading = None
        tokens, (of_token, of_states) = len(job.request.prompt), row_bytes(self.model, self.chunk)
        self._reading_bytes = tokens * of_token + of_states
        try:
            has_memory = self._has_memory(self._reading_bytes, f"the log-probabilities of a prompt of {tokens} tokens need")
        except ValueError as error:
            self._fail(job, Ended(FAILED, str(error), 400))
            return None
        self._reading_waits = not has_memory
        return Reading(job.request.prompt, job.logprobs or 0, job.read) if has_memory else None

    def _admit(self) -> None:
        """Give rows to waiting jobs, the oldest first.

        A full batch group blocks only its own queue. If a job needs a further group, or memory, the method with the fewest
        texts takes no more jobs, so that its rows become free.
        """
        blocked = self._reading_waits  # a job waits for a group or for memory: no further group is made
        full = {self._method_with_fewest_texts("")} if blocked else set[str]()
        for job in list(self._waiting):
            name = job.method.spelled
            if name in full or job.unread or (blocked and name not in self._lanes):
                continue
            try:
                lane = self._lane(job.method)
                if lane is not None and not lane.free:
                    full.add(name)
                    continue
                if lane is None or not self._has_memory_for(lane, length_of(job)):
                    blocked = True
                    full |= {name, self._method_with_fewest_texts(name)}
                    continue
                self._unqueue(job)
                job.waited = time.monotonic() - job.asked
                lane.admit(job)
            except ValueError as error:
                self._fail(job, Ended(FAILED, str(error), 400))
            except Exception as error:
                logger.exception("a request could not be begun")
                self._fail(job, Ended(FAILED, "the request could not be begun: see the server's log"))
                self._count(error)

    def _method_with_fewest_texts(self, besides: str) -> str:
        groups = [(len(one.jobs) - len(one.free), name) for name, one in self._lanes.items() if one.busy and name != besides]
        return min(groups)[1] if groups else besides

    def _end_read(self) -> None:
        """End jobs that want their prompt alone, once it is read."""
        for job in [job for job in self._waiting if not (job.writes or job.unread)]:
            self._unqueue(job)
            self._tell(job, Ended(LENGTH))

    def _unqueue(self, job: Job) -> None:
        """Take a job out of the queue."""
        self._waiting.remove(job)
        with self._lock:
            self._waits -= 1

    def _fail(self, job: Job, ended: Ended) -> None:
        """End a job that could not get a row."""
        if job in self._waiting:
            self._unqueue(job)
        self._tell(job, ended)

    def _lane(self, method: Method) -> Lane | None:
        """The rows of a method; None while the other methods use all groups."""
        name = method.spelled
        if (lane := self._lanes.pop(name, None)) is None:
            if len(self._lanes) >= MAX_BATCH_GROUPS and not self._drop_idle_group():
                return None
            lane = Lane(self.model, method, self.rows, self.capacity, self.chunk, self._tell)
        self._lanes[name] = lane  # the last one now
        return lane

    def _has_memory_for(self, lane: Lane, tokens: int) -> bool:
        """Whether a text of so many tokens may join a group. ValueError if the group alone would take too much."""
        said = f"a text of {tokens} tokens in the {len(lane.jobs)} rows of {lane.method.name} needs"
        return self._has_memory(lane.memory_bytes(tokens), said, lane)

    def _has_memory(self, needed: int, said: str, lane: Lane | None = None) -> bool:
        """Whether there are so many bytes, for a group or for a prompt that is read. Groups without texts make room.
        said: what needs the bytes. ValueError if there are never so many."""
        if needed > self.kv_cache_bytes:
            raise ValueError(
                f"{said} {needed} bytes of keys and values, and the server has {self.kv_cache_bytes} "
                "(--kv-cache-memory-bytes): ask for fewer tokens"
            )
        reading = 0 if self._reading is None else self._reading_bytes
        while (
            needed + reading + sum(one.memory_bytes() for one in self._lanes.values() if one is not lane) > self.kv_cache_bytes
        ):
            if not self._drop_idle_group(lane):
                return False
        return True

    def _drop_idle_group(self, besides: Lane | None = None) -> bool:
        """Free the rows of the least recently used method without texts. False if there is none."""
        idle = next((name for name, lane in self._lanes.items() if not lane.busy and lane is not besides), None)
        return idle is not None and self._lanes.pop(idle) is not None

    def _step(self, lane: Lane) -> Step | None:
        try:
            step = lane.step()
        except Exception as error:
            logger.exception("a step failed: its texts are given up")
            del self._lanes[lane.method.spelled]
            for job in lane.jobs:
                if job is not None:
                    self._tell(job, Ended(FAILED, "decoding failed: see the server's log"))
            self._count(error)
            return None
        self._failures = 0
        return step

    def _count(self, error: Exception) -> None:
        """DeviceFailed after too many consecutive errors of the device."""
        if not of_device(error):
            return
        self._failures += 1
        if self._failures >= MOST_FAILURES:
            raise DeviceFailed(f"{self._failures} errors of the device in a row") from error


def default_kv_cache_bytes(model: LayeredModel) -> int:
    """A share of the memory of the model's device."""
    return int(KV_CACHE_SHARE * device_memory_bytes(model.device))


def of_device(error: Exception) -> bool:
    """Whether an error is one of CUDA that may stay. A lack of memory does not."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, ACCELERATOR_ERROR) or (isinstance(error, RuntimeError) and "CUDA" in str(error))
