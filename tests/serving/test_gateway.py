"""What clients of several replicas see when all goes well, when a replica ends, and when all are taken."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from skipstone.serving.errors import RequestError
from skipstone.serving.middleware import MAX_BODY_BYTES, AccessMiddleware
from skipstone.serving.ray.gateway import MAX_ATTEMPTS, CallReplica, Gateway, ReplicaLost
from skipstone.serving.ray.session_affinity import session_id

Message = dict[str, Any]
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
PLAIN = {**START, "headers": [(b"content-type", b"application/json")]}


def part(text: str, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


class Replicas:
    """Each request is answered by the next of some scripts: messages, or an exception. asked: what they were told."""

    def __init__(self, *scripts: list[Any], running: int = 2) -> None:
        self.scripts, self.asked, self.running = list(scripts), list[tuple[dict[str, Any], bytes, str]](), running

    async def ask(self, scope: dict[str, Any], body: bytes, named: str) -> AsyncGenerator[Message, None]:
        self.asked.append((scope, body, named))
        for one in self.scripts.pop(0):
            if isinstance(one, Exception):
                raise one
            yield one

    async def count(self) -> int:
        return self.running


def front(replicas: Replicas) -> Gateway:
    ask: CallReplica = replicas.ask
    return Gateway(ask, replicas.count)


def sent(replicas: Replicas, method: str = "POST", path: str = "/v1/completions", key: str | None = None, **more: Any) -> Any:
    """The response to one request. key: that the front asks for."""

    async def go() -> httpx.Response:
        transport = httpx.ASGITransport(AccessMiddleware(front(replicas), key), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await client.request(method, path, **more)

    return asyncio.run(go())


def test_a_replica_gets_the_request_and_the_client_its_answer() -> None:
    replicas = Replicas([START, part("data: a\n\n"), part("data: b\n\n"), part("", more=False)])
    body = {"prompt": "x" * 400}
    answer = sent(replicas, json=body, params={"a": "1"})
    assert (answer.status_code, answer.text) == (200, "data: a\n\ndata: b\n\n")
    assert answer.headers["content-type"] == "text/event-stream"
    ((scope, came, named),) = replicas.asked
    assert (scope["method"], scope["path"], scope["query_string"]) == ("POST", "/v1/completions", b"a=1")
    assert json.loads(came) == body
    assert named == session_id([], came) != ""


def test_a_request_of_which_nothing_was_seen_is_asked_once_more() -> None:
    replicas = Replicas([START, ReplicaLost()], [START, part("data: a\n\n", more=False)])
    assert sent(replicas).text == "data: a\n\n"
    assert len(replicas.asked) == MAX_ATTEMPTS == 2
    assert replicas.asked[0] == replicas.asked[1]


def test_after_that_the_client_is_told_to_come_again() -> None:
    replicas = Replicas([ReplicaLost()], [START, ReplicaLost()])
    answer = sent(replicas)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["message"] == "the replica that was to answer has ended"


def test_a_stream_that_was_seen_ends_with_an_error_and_is_not_begun_again() -> None:
    replicas = Replicas([START, part("data: a\n\n"), ReplicaLost()])
    lines = sent(replicas).text.splitlines()
    assert lines[0] == "data: a"
    assert json.loads(lines[2].removeprefix("data: "))["error"]["code"] == 503
    assert "[DONE]" not in lines[2]
    assert len(replicas.asked) == 1


def test_an_answer_that_is_no_stream_is_not_passed_off_as_whole() -> None:
    async def send(message: Message) -> None:
        assert not message.get("body") or message["more_body"], "nothing says that the answer is whole"

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    answer = front(Replicas([PLAIN, part('{"a":'), ReplicaLost()]))(scope, receive, send)
    with pytest.raises(RuntimeError, match="in the middle of an answer"):
        asyncio.run(answer)


def test_where_all_are_taken_the_client_is_told_to_come_again() -> None:
    answer = sent(Replicas([RequestError(429, "full", retry_after=1)]))
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"]["type"] == "rate_limit_error"


@pytest.mark.parametrize(("running", "status"), [(2, 200), (0, 503)])
def test_health_counts_replicas_and_asks_none(running: int, status: int) -> None:
    replicas = Replicas(running=running)
    answer = sent(replicas, "GET", "/health", key="sk")
    assert (answer.status_code, answer.json()["replicas"]) == (status, running)
    assert replicas.asked == []


def test_who_has_no_key_and_what_is_too_long_come_to_no_replica() -> None:
    replicas = Replicas()
    assert sent(replicas, key="sk").status_code == 401
    assert sent(replicas, content=b"x" * (MAX_BODY_BYTES + 1)).status_code == 413

    async def parts() -> AsyncGenerator[bytes, None]:
        for _ in range(MAX_BODY_BYTES // 2**20 + 1):
            yield b"x" * 2**20

    assert sent(replicas, content=parts()).status_code == 413, "a body that does not say how long it is"
    assert replicas.asked == []


def test_a_client_that_goes_before_its_request_is_whole_is_no_request() -> None:
    replicas = Replicas()

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        raise AssertionError(f"nobody reads {message}")

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}
    asyncio.run(front(replicas)(scope, receive, send))
    assert replicas.asked == []
