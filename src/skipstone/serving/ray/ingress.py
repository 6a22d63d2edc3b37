"""The gateway as a deployment of Ray Serve. It is a process of its own and needs no model: nothing here imports torch."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Message

from skipstone.serving.errors import RequestError
from skipstone.serving.middleware import AccessMiddleware
from skipstone.serving.ray.cluster import NEED
from skipstone.serving.ray.gateway import Gateway, ReplicaLost
from skipstone.utils.extras import installed

APPLICATION, REPLICA = "skipstone", "replica"
"""Names of the application and of its replicas' deployment."""


class Ingress:
    """Makes the gateway. replicas: Serve's handle of their deployment."""

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
            raise RequestError(429, "as many requests wait as may", retry_after=1) from None
        except exceptions.RayActorError as error:
            raise ReplicaLost from error
        except (GeneratorExit, asyncio.CancelledError):  # nobody reads on
            answer.cancel()
            raise

    async def _count_replicas(self) -> int:
        status = await asyncio.to_thread(installed("ray.serve", NEED, "ray").status)
        return status.applications[APPLICATION].deployments[REPLICA].replica_states.get("RUNNING", 0)
