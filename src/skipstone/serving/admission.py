"""Which requests get a row, which wait, and which get 429.

A request gets 429 if the queue is full. It waits until its method has a free row, and until the keys and values of all texts in
their full length fit into the limit. A request that could never fit gets 400.
"""

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch

from skipstone.decoding.method import Method
from skipstone.engines.model_runner import ModelRunner
from skipstone.serving.batch_group import BatchGroup, Send
from skipstone.serving.errors import RequestError
from skipstone.serving.logprobs import PromptScorer
from skipstone.serving.pending_request import FAILED, PendingRequest, RequestEnd
from skipstone.utils.limits import KV_CACHE_SHARE, MAX_BATCH_GROUPS, device_memory_bytes
from skipstone.utils.setup_times import collect_setup_seconds

RETRY_AFTER_SECONDS = 1
"""The Retry-After header of a 429."""

PREFILL_CHUNK_SIZE = 256
"""Maximum number of prompt tokens that a row runs in one step."""

ACCELERATOR_ERROR: Any = getattr(torch, "AcceleratorError", ())  # torch has it from 2.8 on
MAX_DEVICE_ERRORS = 2
"""Consecutive device errors after which the model's thread ends. A broken CUDA context stays broken, and only a new process
gets another one."""

logger = logging.getLogger(__name__)


class DeviceError(Exception):
    """The device has failed several times in a row."""


@dataclass(frozen=True)
class AdmissionLimits:
    """max_num_seqs: rows of every batch group. max_model_len: tokens of a text, its prompt included. max_waiting: requests that
    may wait for a row. kv_cache_bytes: keys and values of all groups together; None for a share of the device's memory."""

    max_num_seqs: int
    max_model_len: int
    max_waiting: int
    prefill_chunk_size: int = PREFILL_CHUNK_SIZE
    kv_cache_bytes: int | None = None

    @property
    def of_group(self) -> tuple[int, int, int]:
        """Those of every batch group."""
        return self.max_num_seqs, self.max_model_len, self.prefill_chunk_size


class Admission:
    """The queue of waiting requests, and the batch groups that take them. All but `register` runs in the model's thread.

    send: is called with every event of a request.
    """

    def __init__(self, model: ModelRunner, limits: AdmissionLimits, send: Send) -> None:
        self.model, self.limits, self._send = model, limits, send
        self.kv_cache_bytes = limits.kv_cache_bytes or default_kv_cache_bytes(model)
        self.waiting: deque[PendingRequest] = deque()
        self.groups: dict[str, BatchGroup] = {}  # the least recently used first
        self._scorer: PromptScorer | None = None
        self._scorer_needs_memory = False  # whether a prompt waits for memory to be scored
        self._num_device_errors = 0  # without a successful step between them
        self.lock = threading.Lock()
        self.num_open = 0  # requests that have not ended
        self.num_waiting = 0  # open requests without a row, those that are not in `waiting` yet included

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return self.num_open - self.num_waiting

    @property
    def requests(self) -> list[PendingRequest]:
        """Requests that wait or have a row."""
        return [*self.waiting, *(one for group in self.groups.values() for one in group.requests if one is not None)]

    def register(self, requests: list[PendingRequest]) -> None:
        """Count new requests, all or none. RequestError (429) if the queue is full. The caller holds the lock."""
        if self.num_waiting + len(requests) > self.limits.max_waiting + max(self.limits.max_num_seqs - self.num_running, 0):
            message = f"{self.num_waiting} requests are waiting already; ask again later"
            raise RequestError(429, message, retry_after=RETRY_AFTER_SECONDS)
        self.num_open += len(requests)
        self.num_waiting += len(requests)

    def _dequeue(self, pending: PendingRequest) -> None:
        """Take a request out of the queue."""
        self.waiting.remove(pending)
        with self.lock:
            self.num_waiting -= 1

    def _fail(self, pending: PendingRequest, end: RequestEnd) -> None:
        """End a request that could not get a row."""
        if pending in self.waiting:
            self._dequeue(pending)
        self._send(pending, end)

    def _admit_waiting(self) -> None:
        """Give rows to waiting requests, the oldest first.

        A full batch group blocks only its own queue. If a request needs a further group, or memory, the method with the fewest
        texts takes no more requests, so that its rows become free.
        """
        is_blocked = self._scorer_needs_memory
        full = {self._method_with_fewest_texts("")} if is_blocked else set[str]()
        for pending in list(self.waiting):
            name = pending.method.spelled
            if name in full or pending.needs_prompt_logprobs or (is_blocked and name not in self.groups):
                continue
            try:
                group = self._find_group(pending.method)
                if group is not None and not group.free_rows:
                    full.add(name)
                    continue
                tokens, rows = pending.max_tokens, self.limits.max_num_seqs
                purpose = f"a text of {tokens} tokens in the {rows} rows of {pending.method.name} needs"
                if group is None or not self._has_memory(group.memory_bytes(tokens), purpose, group):
                    is_blocked = True
                    full |= {name, self._method_with_fewest_texts(name)}
                    continue
                self._dequeue(pending)
                pending.queue_seconds = time.monotonic() - pending.arrival_time
                group.admit(pending)
            except ValueError as error:
                self._fail(pending, RequestEnd(FAILED, str(error), 400))
            except Exception as error:
                logger.exception("a request could not be begun")
                self._fail(pending, RequestEnd(FAILED, "the request could not be begun: see the server's log"))
                self._count_device_error(error)

    def _count_device_error(self, error: Exception) -> None:
        """Count an error if it is the device's. DeviceError if there are too many in a row."""
        self._num_device_errors += is_device_error(error)
        if self._num_device_errors >= MAX_DEVICE_ERRORS:
            raise DeviceError(f"{self._num_device_errors} errors of the device in a row") from error

    def _method_with_fewest_texts(self, other_than: str) -> str:
        busy = {name: len(one.requests) - len(one.free_rows) for name, one in self.groups.items() if one.busy}
        busy.pop(other_than, None)
        return min(busy, key=lambda name: (busy[name], name), default=other_than)

    def _find_group(self, method: Method) -> BatchGroup | None:
        """The batch group of a method, created if needed; None while the other methods use all groups."""
        name = method.spelled
        if (group := self.groups.pop(name, None)) is None:
            if len(self.groups) >= MAX_BATCH_GROUPS and not self._drop_idle_group():
                return None
            with collect_setup_seconds():  # which the first step reports
                group = BatchGroup(self.model, method, *self.limits.of_group, self._send)
        self.groups[name] = group
        return group

    def _has_memory(self, needed: int, purpose: str, group: BatchGroup | None = None) -> bool:
        """Whether there are so many bytes for a group, or for a prompt that is scored. Idle groups are dropped to make room.

        purpose: what needs the bytes. ValueError if they exceed the limit in any case.
        """
        limit = self.kv_cache_bytes
        if needed > limit:
            raise ValueError(f"{purpose} {needed} bytes, and --kv-cache-memory-bytes is {limit}: ask for fewer tokens")
        available = limit - needed - (0 if self._scorer is None else self._scorer.nbytes)
        while sum(one.memory_bytes() for one in self.groups.values() if one is not group) > available:
            if not self._drop_idle_group(group):
                return False
        return True

    def _drop_idle_group(self, other_than: BatchGroup | None = None) -> bool:
        """Free the least recently used group without texts. False if there is none."""
        idle = next((name for name, one in self.groups.items() if not one.busy and one is not other_than), None)
        return idle is not None and self.groups.pop(idle) is not None


def default_kv_cache_bytes(model: ModelRunner) -> int:
    """A share of the memory of the model's device."""
    return int(KV_CACHE_SHARE * device_memory_bytes(model.device))


def with_room_for(model: ModelRunner, method: Method, limits: AdmissionLimits) -> AdmissionLimits:
    """The limits with enough memory for a text of full length in the default method's rows. ValueError if they forbid it."""
    rows, length, _ = limits.of_group
    group = BatchGroup(model, method, *limits.of_group, lambda *_: None)
    needed = group.memory_bytes(length)
    if limits.kv_cache_bytes is None:
        return replace(limits, kv_cache_bytes=max(default_kv_cache_bytes(model), needed))
    if limits.kv_cache_bytes < needed:
        size = f"{rows} rows of {method.name} need {needed} bytes of keys and values for texts of {length} tokens"
        remedy = "raise it, or lower --max-num-seqs or --max-model-len"
        raise ValueError(f"{size}, and --kv-cache-memory-bytes is {limits.kv_cache_bytes}: {remedy}")
    return limits


def is_device_error(error: Exception) -> bool:
    """Whether an error is one of CUDA that may stay. A lack of memory does not."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, ACCELERATOR_ERROR) or (isinstance(error, RuntimeError) and "CUDA" in str(error))
