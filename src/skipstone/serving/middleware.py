"""ASGI middleware around every route: the API key and the size of bodies."""

import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from skipstone.serving import playground
from skipstone.serving.errors import RequestError, error_response

MAX_BODY_BYTES = 4 << 20
"""Maximum size of a body."""
TOO_LONG = f"the body is longer than {MAX_BODY_BYTES} bytes"
PUBLIC_PATHS = ("/health", *playground.PATHS)
"""Paths that need no key."""


class AccessMiddleware:
    """Checks the API key and the size of the body."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self.app, self.key = app, None if api_key is None else f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given, length = headers.get(b"authorization", b""), headers.get(b"content-length", b"0")
        refusal = None
        if self.key is not None and scope["path"] not in PUBLIC_PATHS and not hmac.compare_digest(given, self.key):
            refusal = RequestError(401, "the API key is missing or wrong")
        elif not length.isdigit() or int(length) > MAX_BODY_BYTES:
            refusal = RequestError(413, TOO_LONG)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > MAX_BODY_BYTES:
                raise HTTPException(413, TOO_LONG)
            return message

        await self.app(scope, counted, send)
