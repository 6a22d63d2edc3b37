"""What clients of several replicas talk to: it names the conversation of a request, sends the request to a replica, and hands
the answer on while it comes. It knows neither Ray nor a model."""

import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import Message, Receive, Scope, Send

from skipstone.serving import errors
from skipstone.serving.sessions import session

TRIES = 2
"""Replicas that are asked at most: a request of which the client has seen nothing is asked once more where its replica ends."""
AGAIN = 5
"""Seconds after which a client may come again where no replica can answer."""
SENT = ("type", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers")
"""Of an ASGI scope, what a replica is told."""


class Full(Exception):
    """All rows of all replicas are taken, and as many requests wait as may."""


class Lost(Exception):
    """A replica has ended while it answered."""


class Gone(Exception):
    """A client has gone."""


Ask = Callable[[dict[str, Any], bytes, str], AsyncGenerator[Message, None]]
"""scope, body, the conversation's name -> ASGI messages of the answer. Raises Full and Lost."""


class Front:
    """An ASGI application. ask: asks a replica. running: how many replicas take requests."""

    def __init__(self, ask: Ask, running: Callable[[], Awaitable[int]]) -> None:
        self._ask, self._running = ask, running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http" and scope["path"] == "/health":
            await self._health(scope, receive, send)
        elif scope["type"] == "http":
            try:
                await self._answer(scope, await _body(receive), send)
            except Full:
                refusal = errors.response("as many requests wait as may", 429, retry_after=1)
                await refusal(scope, receive, send)
            except Lost:
                refusal = errors.response("the replica that was to answer has ended", 503, retry_after=AGAIN)
                await refusal(scope, receive, send)
            except HTTPException as refused:  # by the guard, of a body that is too long
                await errors.response(refused.detail, refused.status_code)(scope, receive, send)
            except Gone:
                return

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        replicas = await self._running()
        why = {} if replicas else {"reason": "no replica takes requests"}
        content = {"status": "ready" if replicas else "failed", "replicas": replicas} | why
        await JSONResponse(content, 200 if replicas else 503)(scope, receive, send)

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        """Full or Lost before the client has seen anything."""
        told = {name: scope[name] for name in SENT if name in scope}
        named = session(scope["headers"], body)
        for left in reversed(range(TRIES)):
            relay = Relay(send)
            try:
                async with aclosing(self._ask(told, body, named)) as messages:
                    async for message in messages:
                        await relay.take(message)
                await relay.end()
                return
            except Lost:
                if relay.begun:
                    await relay.cut()
                    return
                if not left:
                    raise


class Relay:
    """An answer on its way to a client. begun: whether the client has seen any of it. The head is held back until there is
    something behind it, so that another replica may still answer instead."""

    def __init__(self, send: Send) -> None:
        self._send, self._held = send, list[Message]()
        self._streams = False
        self.begun = False

    async def take(self, message: Message) -> None:
        """Hand a message on."""
        self._held.append(message)
        if self.begun or message.get("body"):
            await self.end()

    async def end(self) -> None:
        """Hand on what is held back."""
        self.begun = self.begun or bool(self._held)
        held, self._held = self._held, []
        for message in held:
            if message["type"] == "http.response.start":
                self._streams = any(b"text/event-stream" in value for _, value in message["headers"])
            await self._send(message)

    async def cut(self) -> None:
        """End an answer whose replica has ended: a stream by an error, as the server itself ends one, without `[DONE]`.
        RuntimeError for an answer that is no stream: the connection is then closed before its length."""
        if not self._streams:
            raise RuntimeError("a replica has ended in the middle of an answer")
        error = json.dumps(errors.body("the replica that wrote this has ended", 503))
        await self._send({"type": "http.response.body", "body": f"data: {error}\n\n".encode(), "more_body": False})


async def _body(receive: Receive) -> bytes:
    """All of it. Gone where the client goes before."""
    parts = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Gone
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


async def _live(receive: Receive, send: Send) -> None:
    """Say that there is nothing to start and nothing to stop."""
    while True:
        phase = (await receive())["type"]
        await send({"type": f"{phase}.complete"})
        if phase == "lifespan.shutdown":
            return
