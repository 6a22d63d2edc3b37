"""The Ray cluster: connecting to one, or starting one on this machine, and whether it has room for replicas."""

import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skipstone.assets import NANO
from skipstone.utils.extras import installed

NEED = "--ray needs Ray Serve"
CONNECT_TIMEOUT_SECONDS = 5.0
"""Time in which a cluster has to take a connection."""
OBJECT_STORE_BYTES = 128 << 20
"""Size of a local cluster's object store. Requests and answers are small and mostly do not pass through it."""
CONNECT_VARIABLES = {
    "RAY_gcs_server_port_wait_time_s": "2",
    "RAY_gcs_rpc_server_connect_timeout_s": "5",
    "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "2",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "3",
}
"""Ray's environment variables for an existing cluster: give up soon if it does not answer. A local cluster that is started here
keeps Ray's own limits, because a busy machine needs them."""
NO_USAGE_STATS = {"RAY_USAGE_STATS_ENABLED": "0"}
"""Ray's environment variable for any cluster: no usage statistics are sent."""
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".gguf")


@dataclass(frozen=True)
class NodeShare:
    """Resources of a node that a replica needs. memory: in bytes."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.cpus:g} CPU{gpus} and {self.memory / 2**30:.1f} GiB"


def weight_bytes(model: str | None) -> int:
    """Bytes of a model's weight files, the minimum that a replica takes. 0 for a hub id that is not downloaded. None: the
    bundled model."""
    folder = NANO if model is None else Path(model)
    files = folder.iterdir() if folder.is_dir() else [folder]
    return sum(file.stat().st_size for file in files if file.suffix in WEIGHT_SUFFIXES and file.is_file())


def count_places(nodes: Iterable[dict[str, Any]], share: NodeShare) -> int:
    """Number of replicas for which a cluster has room. nodes: of `ray.nodes()`."""
    needs = {"CPU": share.cpus, "GPU": share.gpus, "memory": share.memory}
    places = 0
    for node in nodes:
        if node["Alive"]:
            resources = node["Resources"]
            places += int(min((resources.get(name, 0.0) / need for name, need in needs.items() if need), default=0))
    return places


def check_room(share: NodeShare, replicas: int) -> None:
    """ValueError if the connected cluster has no room for so many replicas."""
    places = count_places(installed("ray", NEED, "ray").nodes(), share)
    if places < replicas:
        needed = f"1 replica needs {share}" if replicas == 1 else f"{replicas} replicas need {share} each"
        remedy = "ask for fewer replicas, or for a larger cluster"
        raise ValueError(f"{needed}, and the Ray cluster has room for {places}: {remedy}")


def connect(address: str | None) -> None:
    """Connect to the cluster at an address, or start one on this machine that ends with this process. ValueError for a wrong
    address, ConnectionError if no cluster answers."""
    for name, value in (NO_USAGE_STATS if address is None else NO_USAGE_STATS | CONNECT_VARIABLES).items():
        os.environ.setdefault(name, value)
    if address is not None:
        _expect_listener(address)
    ray = installed("ray", NEED, "ray")
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        local = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
        ray.init(address="local", _node_ip_address="127.0.0.1", **local, **quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConnectionError(f"no Ray cluster answers at {address}: {first}") from error


def _expect_listener(address: str) -> None:
    """ConnectionError if nobody listens there, or somebody who does not speak gRPC. Ray itself would wait for half a minute or
    more."""
    match = re.fullmatch(r"(?:ray://)?(\[.+\]|[^:/]+):([0-9]{1,5})", address)
    if match is None or int(match[2]) >= 1 << 16:
        raise ValueError(f"a Ray address is HOST:PORT or ray://HOST:PORT, found {address!r}")
    host, port = match[1].strip("[]"), int(match[2])
    try:
        socket.create_connection((host, port), timeout=CONNECT_TIMEOUT_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"no Ray cluster answers at {address}: {error.strerror or error}") from None
    if os.environ.get("RAY_USE_TLS", "0") != "0":
        return
    grpc = installed("grpc", NEED, "ray")
    with grpc.insecure_channel(f"{host}:{port}") as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=CONNECT_TIMEOUT_SECONDS)
        except grpc.FutureTimeoutError:
            reason = f"what listens there does not answer within {CONNECT_TIMEOUT_SECONDS:g} s"
            raise ConnectionError(f"no Ray cluster answers at {address}: {reason}") from None
