"""Ray: a cluster of this machine or one that is there, and whether replicas have room in it."""

import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skipstone.assets import NANO
from skipstone.utils.extras import installed

NEED = "--ray needs Ray Serve"
PATIENCE = 5.0
"""Seconds that a cluster has to take a connection."""
OBJECTS = 128 << 20
"""Bytes of a local cluster's object store. Requests and answers are small and mostly do not pass through it."""
GIVES_UP_SOON = {
    "RAY_gcs_server_port_wait_time_s": "2",
    "RAY_gcs_rpc_server_connect_timeout_s": "5",
    "RAY_CLIENT_INITIAL_CONNECTION_TIMEOUT_S": "2",
    "RAY_CLIENT_MAX_CONNECTION_TIMEOUT_S": "3",
}
"""Environment variables of Ray for a cluster that is there, where the user sets none: few tries at one that does not answer. A
cluster that is started here has all the time that Ray gives it: a machine with much else to do needs it."""
NO_USAGE_STATS = {"RAY_USAGE_STATS_ENABLED": "0"}
"""The same for any cluster: nothing is sent anywhere about its use."""
REFUSAL = "ValueError: "
"""The beginning of the line of a traceback that says why a replica could not load its model."""
WEIGHTS = (".safetensors", ".bin", ".gguf")
"""Endings of files that hold weights."""


@dataclass(frozen=True)
class Share:
    """What a replica needs of a node: cores, graphics processors, bytes of memory."""

    cpus: float = 1.0
    gpus: float = 0.0
    memory: int = 0

    def __str__(self) -> str:
        gpus = f", {self.gpus:g} GPU" if self.gpus else ""
        return f"{self.cpus:g} CPU{gpus} and {self.memory / 2**30:.1f} GiB"


def weights(model: str | None) -> int:
    """Bytes of a model's files of weights: the least that a replica takes. 0 for a hub id: nothing is known of it before it is
    downloaded. None: the bundled model."""
    folder = NANO if model is None else Path(model)
    files = folder.iterdir() if folder.is_dir() else [folder]
    return sum(file.stat().st_size for file in files if file.suffix in WEIGHTS and file.is_file())


def places(nodes: Iterable[dict[str, Any]], share: Share) -> int:
    """Replicas for which a cluster has room. nodes: as `ray.nodes()` gives them."""
    found = 0
    for node in nodes:
        if node["Alive"]:
            has = node["Resources"]
            needs = {"CPU": share.cpus, "GPU": share.gpus, "memory": share.memory}
            found += int(min((has.get(name, 0.0) / need for name, need in needs.items() if need), default=0))
    return found


def check_room(share: Share, replicas: int) -> None:
    """ValueError where the cluster that is connected has no room for so many replicas."""
    room = places(installed("ray", NEED, "ray").nodes(), share)
    if room < replicas:
        raise ValueError(
            f"{replicas} {'replica needs' if replicas == 1 else 'replicas need'} {share}{'' if replicas == 1 else ' each'}, "
            f"and the Ray cluster has room for {room}: ask for fewer replicas, or for a larger cluster"
        )


def connect(address: str | None) -> None:
    """Connect to the cluster at an address, or start one on this machine that ends with this process. ValueError for what is no
    address, ConnectionError where no cluster answers."""
    for name, value in (NO_USAGE_STATS if address is None else NO_USAGE_STATS | GIVES_UP_SOON).items():
        os.environ.setdefault(name, value)
    if address is not None:
        _reach(address)
    ray = installed("ray", NEED, "ray")
    quiet = {"logging_level": "ERROR", "log_to_driver": False}
    if address is None:
        local = {"include_dashboard": False, "object_store_memory": OBJECTS}
        ray.init(address="local", _node_ip_address="127.0.0.1", **local, **quiet)
        return
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, TimeoutError, ValueError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConnectionError(f"no Ray cluster answers at {address}: {first}") from error


def _reach(address: str) -> None:
    """Whether anybody listens there: Ray itself waits for half a minute."""
    parts = urlsplit(address if "://" in address else f"ray://{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ValueError(f"a Ray address is HOST:PORT or ray://HOST:PORT, found {address!r}")
    try:
        socket.create_connection((host, port), timeout=PATIENCE).close()
    except OSError as error:
        raise ConnectionError(f"no Ray cluster answers at {address}: {error.strerror or error}") from None
    if os.environ.get("RAY_USE_TLS", "0") == "0":
        _expect_grpc(address, f"{host}:{port}")


def _expect_grpc(address: str, place: str) -> None:
    """ConnectionError where somebody listens who does not speak gRPC: Ray would wait for a minute and more."""
    grpc = installed("grpc", NEED, "ray")
    with grpc.insecure_channel(place) as channel:
        try:
            grpc.channel_ready_future(channel).result(timeout=PATIENCE)
        except grpc.FutureTimeoutError:
            said = f"what listens there does not answer within {PATIENCE:g} s"
            raise ConnectionError(f"no Ray cluster answers at {address}: {said}") from None


def reason(told: Iterable[str]) -> str:
    """What a replica could not be started for, of what Serve tells with all its tracebacks; "" where there is no such line."""
    found = [line.partition(REFUSAL)[2] for one in told for line in one.splitlines() if line.strip().startswith(REFUSAL)]
    return found[-1] if found else ""
