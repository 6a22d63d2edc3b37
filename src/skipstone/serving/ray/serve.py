"""`skipstone serve --ray`: fronts and replicas as an application of Ray Serve."""

import logging
import math
import signal
import threading
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from skipstone.serving.ray.cluster import NEED, Share, check_room, connect, reason
from skipstone.serving.ray.ingress import NAME, REPLICA, Ingress
from skipstone.serving.settings import ServerSettings
from skipstone.serving.sockets import bound_socket
from skipstone.utils.extras import installed

ROUTER = "skipstone.serving.ray.router:SessionRouter"
REPLICA_CLASS = "skipstone.serving.ray.replica.Replica"
"""What only the replicas themselves import, by its name: it brings torch and transformers, which take seconds and memory."""
FRONTED = 16
"""Replicas that one front serves."""
BUSY = 0.75
"""Share of a replica's rows that are to be taken: more requests, running or waiting, ask for another replica."""
REPORTS = 5
"""Times that fronts and replicas tell of their requests while Serve looks at the load before it adds a replica."""
LOOK = 2.0
"""Seconds between two looks at whether a replica is healthy: a dead one is replaced after the next one."""
STARTS = 2
"""Times that a replica is started before it is given up."""
QUIET = {"log_level": "WARNING", "enable_access_log": False}
"""What Serve itself writes into the log: nothing of what goes well."""
OPEN = 1 << 20
"""Requests that a front has at a time: any number, as those that wait for a replica are limited elsewhere."""


@dataclass(frozen=True)
class Scale:
    """How many replicas, and what each of them needs. Between the two numbers, Serve follows the requests that run and wait.
    address: of a cluster; None for one of this machine. up, down: seconds of more or less load before replicas are added or
    taken away."""

    least: int = 1
    most: int = 1
    share: Share = field(default_factory=Share)
    address: str | None = None
    up: float = 10.0
    down: float = 120.0


@dataclass(frozen=True)
class Place:
    """Where clients come in. api_key: that they have to send; None for none."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None


def application(
    load: Callable[[], tuple[Any, Any]], settings: ServerSettings, scale: Scale, api_key: str | None, form: str
) -> Any:
    """What `serve.run` takes. form: of the log."""
    serve = installed("ray.serve", NEED, "ray")
    share = scale.share
    replicas = serve.deployment(
        name=REPLICA,
        max_ongoing_requests=settings.max_num_seqs,
        max_queued_requests=max(1, settings.max_waiting),
        graceful_shutdown_timeout_s=settings.drain_seconds + 1,
        health_check_period_s=LOOK,
        max_constructor_retry_count=STARTS,
        ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus, "memory": share.memory},
        request_router_config={"request_router_class": ROUTER},
        logging_config=QUIET,
        **_numbers(scale, settings.max_num_seqs),
    )(REPLICA_CLASS)
    fronts = serve.deployment(
        name="front",
        num_replicas=math.ceil(scale.most / FRONTED),
        max_ongoing_requests=OPEN,
        graceful_shutdown_timeout_s=settings.drain_seconds + 1,
        ray_actor_options={"num_cpus": 0},
        logging_config=QUIET,
    )(serve.ingress()(Ingress))
    threads = max(1, int(share.cpus))
    return fronts.bind(replicas.bind(load, settings, threads, form), api_key)


def _numbers(scale: Scale, rows: int) -> dict[str, Any]:
    """How many replicas, as Serve is told it."""
    if scale.least == scale.most:
        return {"num_replicas": scale.least}
    target = max(1.0, BUSY * rows)
    seen = max(scale.up, 1.0)
    delays = {"upscale_delay_s": scale.up, "downscale_delay_s": scale.down}
    # Ray 2.60 calls metrics_interval_s deprecated, and obeys nothing else
    delays |= {"look_back_period_s": seen, "metrics_interval_s": seen / REPORTS}
    return {
        "autoscaling_config": {
            "min_replicas": scale.least,
            "max_replicas": scale.most,
            "target_ongoing_requests": target,
            **delays,
        }
    }


@contextmanager
def running(
    load: Callable[[], tuple[Any, Any]], settings: ServerSettings, scale: Scale, place: Place, form: str = "text"
) -> Any:
    """Replicas that take requests at a place. ValueError where the cluster has no room for them or they cannot be started,
    OSError where no cluster answers or the place is taken; the application is gone again after either, and after the block."""
    ray, serve = installed("ray", NEED, "ray"), installed("ray.serve", NEED, "ray")
    if scale.address is None:
        bound_socket(place.host, place.port).close()  # Serve would tell of a busy port by tracebacks
    connect(scale.address)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        check_room(scale.share, scale.least)
        everywhere = "HeadOnly" if scale.address is None else "EveryNode"
        serve.start(proxy_location=everywhere, http_options={"host": place.host, "port": place.port}, logging_config=QUIET)
        try:
            serve.run(application(load, settings, scale, place.api_key, form), name=NAME, route_prefix="/")
            yield
        except RuntimeError as error:
            told = [one.message for one in serve.status().applications[NAME].deployments.values()]
            raise ValueError(f"the replicas could not be started: {reason(told) or error}") from None
        finally:
            serve.delete(NAME)
    finally:
        ray.shutdown()


def listen(load: Callable[[], tuple[Any, Any]], settings: ServerSettings, scale: Scale, place: Place, form: str) -> None:
    """The same until somebody ends this process by SIGINT or SIGTERM."""
    told = threading.Event()
    with running(load, settings, scale, place, form):
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: told.set())
        print(f"skipstone serves at http://{place.host}:{place.port} with {scale.least} to {scale.most} replicas", flush=True)
        while not told.wait(1.0):
            pass
