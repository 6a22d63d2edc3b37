"""A replica, as Ray Serve runs it: the server's own application, which a front asks by messages of ASGI."""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator, Callable
from typing import Any

from starlette.types import Message
from transformers.utils import logging as transformers_logging

from skipstone.engines.native.threads import VARIABLE
from skipstone.serving import logs, tracing
from skipstone.serving.app import make_app
from skipstone.serving.server import Server
from skipstone.serving.settings import ServerSettings

LOOK = 0.05
"""Seconds between two looks at whether the model is loaded."""
LEAVE = 5.0
"""Seconds that the application has to leave a request whose client has gone."""

logger = logging.getLogger(__name__)


def _told(error: Exception) -> str:
    """An error in a line."""
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.filename}: {error.strerror}"
    return " ".join(str(error).split())


class Replica:
    """load: gives model and tokenizer. threads: of the native engine, unless the environment of the replica says how many."""

    async def __init__(
        self, load: Callable[[], tuple[Any, Any]], settings: ServerSettings, threads: int, log_format: str
    ) -> None:
        """Returns when the model is loaded. ValueError, with the reason where it is known, if it cannot be."""
        os.environ.setdefault(VARIABLE, str(threads))
        transformers_logging.disable_progress_bar()
        logs.set_up(log_format)
        tracing.set_up()
        wrong: list[Exception] = []

        def kept() -> tuple[Any, Any]:
            try:
                return load()
            except Exception as error:
                wrong.append(error)
                raise

        self._server = Server(kept, settings)
        self._app = make_app(self._server)
        self._life = self._app.router.lifespan_context(self._app)
        await self._life.__aenter__()
        while self._server.state == "loading":
            await asyncio.sleep(LOOK)
        if self._server.state != "ready":
            raise ValueError(_told(wrong[0]) if wrong else self._server.health[1])

    async def check_health(self) -> None:
        """Asked by Serve, which starts a new replica after a RuntimeError."""
        state, why = self._server.health
        if state == "failed":
            raise RuntimeError(why)

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message], None]:
        """The messages of an answer, as many at a time as there are. scope: of ASGI, what `front.SENT` names. body: all of it.
        A consumer that stops is a client that has gone."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        gone = asyncio.Event()
        asked = iter([{"type": "http.request", "body": body, "more_body": False}])

        async def receive() -> Message:
            if (message := next(asked, None)) is not None:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        def left(work: asyncio.Task[None]) -> None:
            if not work.cancelled() and (error := work.exception()) is not None:
                logger.error("a request ended by a defect", exc_info=error)
            messages.put_nowait(None)

        work = asyncio.create_task(self._app({**scope, "asgi": {"version": "3.0"}}, receive, messages.put))
        work.add_done_callback(left)
        try:
            ended = False
            while not ended:
                found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                ended = found[-1] is None
                if ready := [message for message in found if message is not None]:
                    yield ready
        finally:
            gone.set()
            try:
                await asyncio.wait([work], timeout=LEAVE)
            finally:
                work.cancel()

    async def __del__(self) -> None:
        """Called by Serve when the replica is to end: texts that run may end before."""
        await self._life.__aexit__(None, None, None)
