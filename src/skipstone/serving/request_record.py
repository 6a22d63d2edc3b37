"""What becomes of every HTTP request: a record, which is told to the counters, the trace and the log when the request ends.

No word of a prompt, of an answer or of a key is in what a record tells.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skipstone.serving.answers import Answer
from skipstone.serving.pending_request import CANCELLED, FAILED, TIMEOUT

CLIENT_CLOSED = 499
"""The status where nothing was sent, because the client or the server had gone."""
UNKNOWN_ROUTE = "other"
"""The route of paths that there are not: what clients make up is no name for a counter."""
SETTINGS = ("n", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
"""Numbers of a body that a trace has."""

logger = logging.getLogger(__name__)


@dataclass
class RequestRecord:
    """One request. model: that the server has. verb, route: of HTTP. headers: as they came. began, ended: its first and its
    last byte, in seconds of `time.monotonic`. clock: nanoseconds since 1970 when it began. status: of HTTP. streamed: whether
    it was answered by events. answer: where it writes. settings: of its body. as_json: whether that asks for JSON, None where
    it does not say. trace: the id of its trace, "" for none."""

    model: str
    verb: str
    route: str
    headers: Sequence[tuple[bytes, bytes]] = field(default=(), repr=False)
    began: float = field(default_factory=time.monotonic)
    clock: int = field(default_factory=time.time_ns)
    ended: float = 0.0
    status: int = 0
    streamed: bool = False
    answer: Answer | None = None
    settings: dict[str, int | float] = field(default_factory=dict)
    as_json: bool | None = None
    trace: str = ""
    own_id: str = field(default_factory=lambda: f"req-{secrets.token_hex(12)}")

    @property
    def id(self) -> str:
        """Of the answer, which clients know; else one of its own."""
        return self.own_id if self.answer is None else self.answer.id

    @property
    def reasons(self) -> list[str]:
        """Why its texts have ended."""
        return [] if self.answer is None else [choice.reason or CANCELLED for choice in self.answer.choices]

    @property
    def failed(self) -> str | None:
        """What went wrong with its texts after they were begun; None for nothing."""
        return next((reason for reason in (FAILED, TIMEOUT) if reason in self.reasons), None)

    @property
    def cancelled(self) -> bool:
        """Whether it was given up before its end because somebody had gone."""
        return self.status == CLIENT_CLOSED or (CANCELLED in self.reasons and self.failed is None)

    def nanoseconds(self, moment: float) -> int:
        """A moment of `time.monotonic`, in nanoseconds since 1970."""
        return self.clock + round(1e9 * (moment - self.began))

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """Where the time of an answer went: it waits for a row, its prompt is read, it is written; (from, to) in seconds of
        `time.monotonic`. Of several texts, the first one that comes so far ends a phase."""
        if self.answer is None:
            return {}
        requests, found = [choice.pending for choice in self.answer.choices], {}
        began = min(pending.arrival_time for pending in requests)
        rows = [pending.arrival_time + pending.queue_seconds for pending in requests if pending.queue_seconds]
        firsts = [choice.pending.arrival_time + choice.first for choice in self.answer.choices if choice.first is not None]
        for name, moments in (("queue", rows), ("prefill", firsts)):
            found[name] = began, min(moments, default=self.ended)
            began = found[name][1]
            if not moments:
                return found
        found["decode"] = began, max(self.ended, began)
        return found

    def fields(self) -> dict[str, Any]:
        """What a log says of it. Milliseconds: `total` from the first byte to the last, `queue` until the last of its texts had
        a row, `first_token` from there that it was taken to the first token of any text."""
        found: dict[str, Any] = {"id": self.id, "verb": self.verb, "route": self.route, "model": self.model}
        found |= {"status": self.status, "streamed": self.streamed, "cancelled": self.cancelled}
        found["total_ms"] = _milliseconds(self.ended - self.began)
        if self.answer is not None:
            found |= self._answer_fields(self.answer)
        return found | ({"trace_id": self.trace} if self.trace else {})

    def _answer_fields(self, answer: Answer) -> dict[str, Any]:
        usage, choices = answer.usage(), answer.choices
        firsts = [choice.first for choice in choices if choice.first is not None]
        figures = [choice.pending.stats for choice in choices]
        return {
            "finish_reasons": self.reasons,
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "queue_ms": _milliseconds(
                max(choice.pending.queue_seconds or self.ended - choice.pending.arrival_time for choice in choices)
            ),
            "first_token_ms": _milliseconds(min(firsts)) if firsts else None,
            "method": choices[0].pending.method.spelled,
            "drafted": sum(one.drafted for one in figures),
            "accepted": sum(one.accepted for one in figures),
        }


_current: ContextVar[RequestRecord | None] = ContextVar("skipstone_request", default=None)


def attach_answer(answer: Answer, body: Any) -> None:
    """The request that is being handled writes an answer to a body."""
    if (record := _current.get()) is None:
        return
    record.answer = answer
    asked = {name: getattr(body, name) for name in SETTINGS if name in body.model_fields_set}
    record.settings = {name: value for name, value in asked.items() if value is not None}
    if (wanted := getattr(body, "response_format", None)) is not None:
        record.as_json = wanted.type != "text"


class RecordMiddleware:
    """Around everything else: keeps a record of every request. model: that the server has. tellers: are called with a record
    when its request has ended; what one of them raises is logged and hurts nobody."""

    def __init__(self, app: ASGIApp, model: str, reporters: Sequence[Callable[[RequestRecord], None]]) -> None:
        self.app, self.model, self.reporters = app, model, reporters

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        record = RequestRecord(self.model, scope["method"], _route(scope), scope["headers"])

        async def watched(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                kind = dict(message.get("headers", ())).get(b"content-type", b"")
                record.streamed = kind.startswith(b"text/event-stream")
            await send(message)

        before = _current.set(record)
        try:
            await self.app(scope, receive, watched)
        except Exception:
            record.status = record.status or 500
            raise
        finally:
            _current.reset(before)
            record.ended = time.monotonic()
            record.status = record.status or CLIENT_CLOSED
            self._tell(record)

    def _tell(self, record: RequestRecord) -> None:
        for tell in self.reporters:
            try:
                tell(record)
            except Exception:
                logger.exception("a request could not be told of")


def _route(scope: Scope) -> str:
    return next((route.path for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE), UNKNOWN_ROUTE)


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
