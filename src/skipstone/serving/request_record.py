"""The record of an HTTP request: metrics, trace and log report it when the request ends.

It has no text of a prompt or an answer, and no key.
"""

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skipstone.serving.completions_api import Completion
from skipstone.serving.errors import RequestError, error_response
from skipstone.serving.pending_request import CANCELLED, FAILED, TIMEOUT

RECORD = "skipstone.record"
"""The key of a request's record in its ASGI scope."""
CLIENT_CLOSED = 499
"""The status if nothing was sent, because the client or the server had gone."""
UNKNOWN_ROUTE = "other"
"""The route of unknown paths. What clients make up is no label of a counter."""
SETTINGS = ("n", "temperature", "top_p", "top_k", "presence_penalty", "frequency_penalty", "seed")
"""Numbers of a body that a trace reports."""

logger = logging.getLogger(__name__)


@dataclass
class RequestRecord:
    """One HTTP request.

    model: name of the server's model. start_time, end_time: of its first and last byte, in seconds of `time.monotonic`.
    start_nanoseconds: the start since 1970. streamed: whether the answer was a stream. settings: numbers of the body. as_json:
    whether the body asks for JSON, None if it does not say. trace: id of its trace, "" for none.
    """

    model: str
    verb: str
    route: str
    headers: Sequence[tuple[bytes, bytes]] = field(default=(), repr=False)
    start_time: float = field(default_factory=time.monotonic)
    start_nanoseconds: int = field(default_factory=time.time_ns)
    end_time: float = 0.0
    status: int = 0
    streamed: bool = False
    completion: Completion | None = None
    settings: dict[str, int | float] = field(default_factory=dict)
    as_json: bool | None = None
    trace: str = ""
    own_id: str = field(default_factory=lambda: f"req-{secrets.token_hex(12)}")

    def attach(self, completion: Completion) -> None:
        """Add an answer and what its body says."""
        self.completion, body = completion, completion.body
        given = {name: getattr(body, name) for name in SETTINGS if name in body.model_fields_set}
        self.settings = {name: value for name, value in given.items() if value is not None}
        if body.response_format is not None:
            self.as_json = body.response_format.type != "text"

    @property
    def id(self) -> str:
        """Id of the answer, which clients know; without an answer an id of its own."""
        return self.own_id if self.completion is None else self.completion.id

    @property
    def finish_reasons(self) -> list[str]:
        """The finish reasons of its texts."""
        return [] if self.completion is None else [choice.finish_reason or CANCELLED for choice in self.completion.choices]

    @property
    def failure(self) -> str | None:
        """The finish reason of a text that failed; None if there is none."""
        return next((reason for reason in (FAILED, TIMEOUT) if reason in self.finish_reasons), None)

    @property
    def is_cancelled(self) -> bool:
        """Whether it ended early because the client has gone or the server was stopped."""
        return self.status == CLIENT_CLOSED or (CANCELLED in self.finish_reasons and self.failure is None)

    def nanoseconds(self, moment: float) -> int:
        """A moment of `time.monotonic`, in nanoseconds since 1970."""
        return self.start_nanoseconds + round(1e9 * (moment - self.start_time))

    @property
    def phases(self) -> dict[str, tuple[float, float]]:
        """Phase -> (start, end) in seconds of `time.monotonic`: "queue" until a row is free, "prefill" until the first token,
        "decode". With several texts, the first one that comes so far ends a phase."""
        if self.completion is None:
            return {}
        choices, phases = self.completion.choices, {}
        start = min(choice.pending.arrival_time for choice in choices)
        begun = [one for one in choices if one.first_token_seconds is not None]
        ends = {
            "queue": [one.pending.arrival_time + one.pending.queue_seconds for one in choices if one.pending.queue_seconds],
            "prefill": [one.pending.arrival_time + (one.first_token_seconds or 0.0) for one in begun],
            "decode": [self.end_time],
        }
        for name, moments in ends.items():
            end = max(start, min(moments, default=self.end_time))
            phases[name] = start, end
            if not moments:
                break
            start = end
        return phases

    def fields(self) -> dict[str, Any]:
        """The fields of its log line. total_ms: from the first byte to the last. queue_ms: until the last of its texts had a
        row. setup_ms: of set-up work that they waited for. first_token_ms: from its arrival to the first token of any text."""
        fields: dict[str, Any] = {"id": self.id, "verb": self.verb, "route": self.route, "model": self.model}
        fields |= {"status": self.status, "streamed": self.streamed, "cancelled": self.is_cancelled}
        fields["total_ms"] = _milliseconds(self.end_time - self.start_time)
        if self.completion is not None:
            fields |= self._completion_fields(self.completion)
        return fields | ({"trace_id": self.trace} if self.trace else {})

    def _completion_fields(self, completion: Completion) -> dict[str, Any]:
        usage, choices, stats, first = completion.usage(), completion.choices, completion.stats, completion.first_token_seconds
        waits = [choice.pending.queue_seconds or self.end_time - choice.pending.arrival_time for choice in choices]
        return {
            "finish_reasons": self.finish_reasons,
            "prompt_tokens": usage["prompt_tokens"],
            "completion_tokens": usage["completion_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
            "queue_ms": _milliseconds(max(waits)),
            "setup_ms": _milliseconds(max(choice.pending.stats.setup_seconds for choice in choices)),
            "first_token_ms": None if first is None else _milliseconds(first),
            "method": choices[0].pending.method.spelled,
            "drafted": stats.drafted,
            "accepted": stats.accepted,
        }


class RecordMiddleware:
    """ASGI middleware around all others: records every request, and answers 500 if a route fails. An exception handler of
    FastAPI's would raise the error again, and uvicorn would close a connection that the client wants to use again.

    reporters: get the record of a request that has ended; their errors are only logged."""

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

        try:
            await self.app({**scope, RECORD: record}, receive, watched)
        except Exception:
            if record.status:
                raise
            logger.exception("a route failed")
            await error_response(RequestError(500, "a defect of the server: see its log"))(scope, receive, watched)
        finally:
            record.end_time = time.monotonic()
            record.status = record.status or CLIENT_CLOSED
            self._report(record)

    def _report(self, record: RequestRecord) -> None:
        for report in self.reporters:
            try:
                report(record)
            except Exception:
                logger.exception("a reporter of requests failed")


def _route(scope: Scope) -> str:
    return next((route.path for route in scope["app"].routes if route.matches(scope)[0] is not Match.NONE), UNKNOWN_ROUTE)


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
