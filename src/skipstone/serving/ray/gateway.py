"""The gateway in front of several replicas: it sends each request to a replica and passes the answer on while it comes.

A request that a dying replica has not answered visibly is sent to another one. `Gateway` does not know Ray; `Ingress`
deploys it on Ray Serve, in a process without a model. Nothing here imports torch."""

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.routing import Router
from starlette.types import Message, Receive, Scope, Send

from skipstone.serving.errors import RequestError, error_body, error_response
from skipstone.serving.middleware import AccessMiddleware
from skipstone.serving.ray.cluster import NEED
from skipstone.serving.ray.session_affinity import session_id
from skipstone.utils.extras import installed

MAX_ATTEMPTS = 2
"""Replicas that may get a request. Only a request without any visible answer goes to a second one."""
RETRY_AFTER_SECONDS = 5
"""The Retry-After header if no replica can answer."""
SENT_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "root_path", "query_string", "headers")
"""The parts of an ASGI scope that a replica gets."""
APPLICATION, REPLICA = "skipstone", "replica"
"""Names of Serve's application and of its replicas' deployment."""


class ReplicaLost(Exception):
    """A replica has ended while it answered."""


CallReplica = Callable[[dict[str, Any], bytes, str], AsyncGenerator[Message, None]]
"""(scope, body, session id) -> ASGI messages of the answer. Raises ReplicaLost, and RequestError if all replicas are full."""


class Gateway:
    """An ASGI application. call_replica: answers a request. count_replicas: number of replicas that take requests."""

    def __init__(self, call_replica: CallReplica, count_replicas: Callable[[], Awaitable[int]]) -> None:
        self._call_replica, self._count_replicas = call_replica, count_replicas

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] == "lifespan":
            await Router()(scope, receive, send)
        elif scope["type"] == "http" and scope["path"] == "/health":
            replicas = await self._count_replicas()
            reason = {} if replicas else {"reason": "no replica takes requests"}
            content = {"status": "ready" if replicas else "failed", "replicas": replicas} | reason
            await JSONResponse(content, 200 if replicas else 503)(scope, receive, send)
        elif scope["type"] == "http":
            try:
                await self._answer(scope, await Request(scope, receive).body(), send)
            except RequestError as error:
                await error_response(error)(scope, receive, send)
            except HTTPException as error:  # AccessMiddleware's, for a body that is too long
                await error_response(RequestError(error.status_code, error.detail))(scope, receive, send)
            except ClientDisconnect:
                return

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        """Pass on an answer. Its head is held back until a body follows, so that another replica may still answer instead.
        Losing a replica after its whole answer changes nothing. RequestError before the client has seen anything."""
        sent_scope = {name: scope[name] for name in SENT_SCOPE if name in scope}
        session = session_id(scope["headers"], body)
        for _ in range(MAX_ATTEMPTS):
            held, has_begun, is_stream, is_complete = list[Message](), False, False, False
            try:
                async with aclosing(self._call_replica(sent_scope, body, session)) as messages:
                    async for message in messages:
                        held.append(message)
                        is_stream |= any(b"text/event-stream" in value for _, value in message.get("headers", ()))
                        is_complete = message["type"] == "http.response.body" and not message.get("more_body")
                        has_begun |= is_complete or bool(message.get("body"))
                        while has_begun and held:
                            await send(held.pop(0))
                return
            except ReplicaLost:
                if is_complete:
                    return
                if has_begun:
                    await send(_cut_off(is_stream))
                    return
        raise RequestError(503, "the replica that was to answer has ended", retry_after=RETRY_AFTER_SECONDS)


def _cut_off(is_stream: bool) -> Message:
    """The end of an answer after its replica has ended. A stream ends with an error and without `[DONE]`, as on the server
    itself. RuntimeError for any other answer, so that the connection is closed before the promised length."""
    if not is_stream:
        raise RuntimeError("a replica has ended in the middle of an answer")
    error = json.dumps(error_body(RequestError(503, "the replica that wrote this has ended")))
    return {"type": "http.response.body", "body": f"data: {error}\n\n".encode(), "more_body": False}


class Ingress:
    """The gateway as a deployment of Ray Serve. replicas: Serve's handle of their deployment."""

    def __init__(self, replicas: Any, api_key: str | None) -> None:
        self._replicas, self._api_key = replicas, api_key

    def __serve_build_asgi_app__(self) -> Any:
        return AccessMiddleware(Gateway(self._call_replica, self._count_replicas), self._api_key)

    async def _call_replica(self, scope: dict[str, Any], body: bytes, session: str) -> AsyncGenerator[Message, None]:
        exceptions, serve = installed("ray.exceptions", NEED, "ray"), installed("ray.serve.exceptions", NEED, "ray")
        answer = self._replicas.options(method_name="answer", stream=True, session_id=session).remote(scope, body)
        try:
            async for messages in answer:
                for message in messages:
                    yield message
        except serve.BackPressureError:
            raise RequestError(429, "the queues of all replicas are full; ask again later", retry_after=1) from None
        except exceptions.RayActorError as error:
            raise ReplicaLost from error
        except (GeneratorExit, asyncio.CancelledError):  # nobody reads on
            answer.cancel()
            raise

    async def _count_replicas(self) -> int:
        status = await asyncio.to_thread(installed("ray.serve", NEED, "ray").status)
        return status.applications[APPLICATION].deployments[REPLICA].replica_states.get("RUNNING", 0)
