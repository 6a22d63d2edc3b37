"""The server at a port of this machine, until somebody ends it or there is no model any more."""

from contextlib import suppress

import uvicorn

from skipstone.serving.app import make_app
from skipstone.serving.server import Server

LAST_WORDS = 3
"""Seconds that clients have to read that nothing more is written."""


def listen(server: Server, host: str, port: int, api_key: str | None = None) -> bool:
    """Returns whether it was ended by somebody: False where the model could not be loaded, or its thread has died, so that only
    another process could go on."""
    whole = True
    wait = int(server.settings.drain) + 1
    app = make_app(server, api_key)
    config = uvicorn.Config(app, host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=wait)
    listener = uvicorn.Server(config)

    def failed() -> None:
        nonlocal whole
        whole, config.timeout_graceful_shutdown, listener.should_exit = False, LAST_WORDS, True

    server.failed = failed
    with suppress(KeyboardInterrupt):
        listener.run()
    return whole
