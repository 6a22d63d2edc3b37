"""A front, as Ray Serve runs it. It is a process of its own and needs no model: nothing here imports torch."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Message

from skipstone.serving.middleware import AccessMiddleware
from skipstone.serving.ray.cluster import NEED
from skipstone.serving.ray.front import Front, Full, Lost
from skipstone.utils.extras import installed

NAME, REPLICA = "skipstone", "replica"
"""Of the application, and of the replicas in it."""


class Ingress:
    """A front, as Ray Serve runs it. replicas: Serve's handle of them."""

    def __init__(self, replicas: Any, api_key: str | None) -> None:
        self._replicas, self._key = replicas, api_key

    def __serve_build_asgi_app__(self) -> Any:
        return AccessMiddleware(Front(self._ask, self._running), self._key)

    async def _ask(self, scope: dict[str, Any], body: bytes, named: str) -> AsyncGenerator[Message, None]:
        exceptions, serve = installed("ray.exceptions", NEED, "ray"), installed("ray.serve.exceptions", NEED, "ray")
        answer = self._replicas.options(method_name="answer", stream=True, session_id=named).remote(scope, body)
        try:
            async for messages in answer:
                for message in messages:
                    yield message
        except serve.BackPressureError:
            raise Full from None
        except exceptions.RayActorError as error:
            raise Lost from error
        except (GeneratorExit, asyncio.CancelledError):  # nobody reads on
            answer.cancel()
            raise

    async def _running(self) -> int:
        status = await asyncio.to_thread(installed("ray.serve", NEED, "ray").status)
        return status.applications[NAME].deployments[REPLICA].replica_states.get("RUNNING", 0)
