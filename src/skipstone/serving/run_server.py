"""Runs the server at a socket until a signal, or until there is no model."""

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn

from skipstone.serving.app import make_app
from skipstone.serving.server import FLUSH_SECONDS, Server
from skipstone.serving.sockets import url_of

logger = logging.getLogger(__name__)


class DrainingServer(uvicorn.Server):
    """Drains at the first signal: clients get 503 while texts end, then it stops. uvicorn would stop listening at once. A
    second signal ends the process."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self._server = server
        self._drained: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Called for SIGINT and SIGTERM, in the thread of the event loop. uvicorn's own is not called: it would have every
        stream cut (sse-starlette patches it)."""
        if self._drained is not None or self.should_exit:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        loop = asyncio.get_running_loop()
        self._drained = loop.create_task(self._drain())
        loop.call_soon_threadsafe(lambda: None)  # a loop that waits for events does not see a task that a signal has made

    async def _drain(self) -> None:
        seconds = self._server.settings.drain_seconds
        logger.info("shutting down: texts have %g s to end, and another signal ends them at once", seconds)
        await self._server.drain()
        self.should_exit = True


def listen(server: Server, at: socket.socket, api_key: str | None = None) -> bool:
    """Run until the end. Returns False if the model could not be loaded or its thread has ended, so that only a new process
    helps."""
    whole, url = True, url_of(at)
    app = make_app(server, api_key)
    config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=FLUSH_SECONDS)
    listener = DrainingServer(config, server)

    def failed() -> None:
        nonlocal whole
        whole, listener.should_exit = False, True

    def became_ready() -> None:
        logger.info("ready: %s takes requests", url)
        server.prepare_in_background()

    server.failed, server.became_ready = failed, became_ready
    logger.info("loading the model: %s/health tells when it is ready", url)
    listener.run(sockets=[at])
    return whole
