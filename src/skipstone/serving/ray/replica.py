"""A replica as a deployment of Ray Serve: the server's own application, which gets requests as ASGI messages."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Message
from transformers.utils import logging as transformers_logging

from skipstone.engines.native.threads import VARIABLE
from skipstone.serving import logs, tracing
from skipstone.serving.app import make_app
from skipstone.serving.server import Server
from skipstone.serving.settings import Load, ServerSettings

LEAVE_SECONDS = 5.0
"""Time that the application has to leave a request after its client has gone."""

logger = logging.getLogger(__name__)


def _error_line(error: BaseException) -> str:
    """An error in one line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


class Replica:
    """load: returns model and tokenizer. threads: of the native engine, unless the replica's environment sets a number."""

    async def __init__(self, load: Load, settings: ServerSettings, threads: int, log_format: str) -> None:
        """Returns when the model is loaded. ValueError with the reason if it cannot be."""
        os.environ.setdefault(VARIABLE, str(threads))
        transformers_logging.disable_progress_bar()
        logs.set_up(log_format)
        tracing.set_up()
        self._server = Server(load, settings)
        self._app = make_app(self._server)
        try:
            await self._server.load()
        except Exception as error:
            raise ValueError(_error_line(error)) from error
        self._server.prepare_in_background()

    async def check_health(self) -> None:
        """Called by Serve, which starts a new replica after a RuntimeError."""
        state, reason = self._server.health
        if state == "failed":
            raise RuntimeError(reason)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
        """The messages of an answer, all at a time that are there. scope: of ASGI, the parts in `gateway.SENT_SCOPE`. body:
        complete. A consumer that stops counts as a client that has gone."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        client_gone = asyncio.Event()
        request = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            if (message := next(request, None)) is not None:
                return message
            await client_gone.wait()
            return {"type": "http.disconnect"}

        def end(work: asyncio.Task[None]) -> None:
            if not work.cancelled() and (error := work.exception()) is not None:
                logger.error("a request ended by a defect", exc_info=error)
            messages.put_nowait(None)

        work = asyncio.create_task(self._app({**scope, "asgi": {"version": "3.0"}}, receive, messages.put))
        work.add_done_callback(end)
        try:
            has_ended = False
            while not has_ended:
                taken = [await messages.get()]
                while not messages.empty():
                    taken.append(messages.get_nowait())
                has_ended = taken[-1] is None
                if ready := [message for message in taken if message is not None]:
                    yield ready
        finally:
            client_gone.set()
            try:
                await asyncio.wait([work], timeout=LEAVE_SECONDS)
            finally:
                work.cancel()

    async def __del__(self) -> None:
        """Called by Serve when the replica is to end. Running texts may end first."""
        await self._server.stop()
        await asyncio.to_thread(tracing.flush)
