"""`skipstone serve --ray`: gateways and replicas as an application of Ray Serve."""

import logging
import math
import signal
import threading
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from skipstone.serving.ray.cluster import NEED, NodeShare, check_room, connect
from skipstone.serving.ray.gateway import APPLICATION, REPLICA, Ingress
from skipstone.serving.settings import Load, ServerSettings
from skipstone.serving.sockets import bound_socket
from skipstone.utils.extras import installed

ROUTER = "skipstone.serving.ray.router:SessionRouter"
REPLICA_CLASS = "skipstone.serving.ray.replica.Replica"
"""Only the replicas import it, by this name. Its torch and transformers take seconds and memory."""
REPLICAS_PER_GATEWAY = 16
TARGET_LOAD = 0.75
"""Share of a replica's rows that should be taken. If more requests run or wait, Serve adds a replica."""
REPORTS_PER_DELAY = 5
"""Load reports of gateways and replicas during the time in which Serve watches the load before it adds a replica."""
HEALTH_CHECK_SECONDS = 2.0
"""Time between two health checks. A dead replica is replaced after the next check."""
MAX_STARTS = 2
"""Attempts to start a replica."""
QUIET = {"log_level": "WARNING", "enable_access_log": False}
"""Serve logs only problems."""
UNLIMITED_REQUESTS = 1 << 20
"""Requests of a gateway at a time. Those that wait for a replica have a limit of their own."""
LOAD_ERROR = "ValueError: "
"""The beginning of the traceback's line with the reason why a replica could not load its model."""


@dataclass(frozen=True)
class ReplicaSettings:
    """Number and resources of replicas, and where their gateway listens. Between the two numbers, Serve follows the load.

    address: of a cluster; None for a new one on this machine. api_key: clients must send it; None for no key. log_format: as in
    `logs.set_up`. upscale_delay_seconds, downscale_delay_seconds: time of more or less load before replicas are added or
    removed."""

    min_replicas: int = 1
    max_replicas: int = 1
    share: NodeShare = field(default_factory=NodeShare)
    address: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    log_format: str = "text"
    upscale_delay_seconds: float = 10.0
    downscale_delay_seconds: float = 120.0


def build_application(load: Load, settings: ServerSettings, replicas: ReplicaSettings) -> Any:
    """The application for `serve.run`."""
    serve = installed("ray.serve", NEED, "ray")
    share = replicas.share
    common = {"graceful_shutdown_timeout_s": settings.drain_seconds + 1, "logging_config": QUIET}
    replica = serve.deployment(
        name=REPLICA,
        max_ongoing_requests=settings.max_num_seqs,
        max_queued_requests=max(1, settings.max_waiting),
        health_check_period_s=HEALTH_CHECK_SECONDS,
        max_constructor_retry_count=MAX_STARTS,
        ray_actor_options={"num_cpus": share.cpus, "num_gpus": share.gpus, "memory": share.memory},
        request_router_config={"request_router_class": ROUTER},
        **common,
        **_scaling(replicas, settings.max_num_seqs),
    )(REPLICA_CLASS)
    gateway = serve.deployment(
        name="gateway",
        num_replicas=math.ceil(replicas.max_replicas / REPLICAS_PER_GATEWAY),
        max_ongoing_requests=UNLIMITED_REQUESTS,
        ray_actor_options={"num_cpus": 0},
        **common,
    )(serve.ingress()(Ingress))
    return gateway.bind(replica.bind(load, settings, max(1, int(share.cpus)), replicas.log_format), replicas.api_key)


def _scaling(replicas: ReplicaSettings, max_num_seqs: int) -> dict[str, Any]:
    """The number of replicas, as a setting of Serve."""
    if replicas.min_replicas == replicas.max_replicas:
        return {"num_replicas": replicas.min_replicas}
    look_back = max(replicas.upscale_delay_seconds, 1.0)
    return {
        "autoscaling_config": {
            "min_replicas": replicas.min_replicas,
            "max_replicas": replicas.max_replicas,
            "target_ongoing_requests": max(1.0, TARGET_LOAD * max_num_seqs),
            "upscale_delay_s": replicas.upscale_delay_seconds,
            "downscale_delay_s": replicas.downscale_delay_seconds,
            "look_back_period_s": look_back,
            "metrics_interval_s": look_back / REPORTS_PER_DELAY,  # Ray 2.60 calls it deprecated, and obeys nothing else
        }
    }


def load_error(messages: Iterable[str]) -> str:
    """The reason why a replica could not load its model, from Serve's messages with tracebacks; "" if there is none."""
    lines = [line.strip() for message in messages for line in message.splitlines()]
    return next((line.removeprefix(LOAD_ERROR) for line in reversed(lines) if line.startswith(LOAD_ERROR)), "")


def listen(load: Load, settings: ServerSettings, replicas: ReplicaSettings) -> None:
    """Serve until SIGINT or SIGTERM ends this process. ValueError if the cluster has no room for the replicas or they cannot be
    started, OSError if no cluster answers or the port is busy."""
    ray, serve = installed("ray", NEED, "ray"), installed("ray.serve", NEED, "ray")
    host, port = replicas.host, replicas.port
    if replicas.address is None:
        bound_socket(host, port).close()  # Serve would report a busy port by tracebacks
    connect(replicas.address)
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        check_room(replicas.share, replicas.min_replicas)
        proxies = "HeadOnly" if replicas.address is None else "EveryNode"
        serve.start(proxy_location=proxies, http_options={"host": host, "port": port}, logging_config=QUIET)
        stack.callback(serve.delete, APPLICATION)
        try:
            serve.run(build_application(load, settings, replicas), name=APPLICATION, route_prefix="/")
        except RuntimeError as error:
            messages = [one.message for one in serve.status().applications[APPLICATION].deployments.values()]
            raise ValueError(f"the replicas could not be started: {load_error(messages) or error}") from None
        stopped = threading.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: stopped.set())
        counts = f"{replicas.min_replicas} to {replicas.max_replicas} replicas"
        print(f"skipstone serves at http://{host}:{port} with {counts}", flush=True)
        while not stopped.wait(1.0):
            pass
