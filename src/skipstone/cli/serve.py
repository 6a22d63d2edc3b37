"""`skipstone serve`: an OpenAI-compatible server."""

import os
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Any

import typer

from skipstone.cli.option_groups import GenerationModelOptions, MethodOptions
from skipstone.cli.options import OptionGroup, option
from skipstone.cli.terminal import DEFECT, USER_ERROR
from skipstone.utils.extras import installed

if TYPE_CHECKING:
    from skipstone.serving.settings import ServerSettings

API_KEY = "SKIPSTONE_API_KEY"
"""The environment variable of --api-key, which other users of a machine do not see."""
LOG_FORMATS = ("text", "json")  # those of skipstone.serving.logs, which would import starlette
RAY_ADDRESS = "Of a running cluster, HOST:PORT or ray://HOST:PORT. Default: a new one, on this machine."


@dataclass(frozen=True)
class TextLimitOptions(OptionGroup, panel="Scheduling"):
    """How many texts are written at a time, and how long they are."""

    max_num_seqs: int = option(8, "Texts that are written at a time.", min=1, max=1024)
    max_model_len: int | None = option(None, "Most tokens of a text and its prompt. Default: the model's, at most 4096.", min=2)


@dataclass(frozen=True)
class ServerOptions(OptionGroup, panel="Server"):
    """Where clients reach the server, what they must send, and what it writes."""

    host: str = option("127.0.0.1", "The address to listen at. Others than this machine reach 0.0.0.0.")
    port: int = option(8000, "The port; 0 for one that is free.", min=0, max=65535)
    api_key: str | None = option(None, f"What clients have to send. Default: the environment variable {API_KEY}.")
    served_model_name: str | None = option(None, "What clients call the model. Default: the name it was loaded by.")
    log_format: str = option("text", "for the log on stderr; requests have a line.", choices=LOG_FORMATS)

    @property
    def key(self) -> str | None:
        """The API key, if there is one."""
        return self.api_key or os.environ.get(API_KEY)


@dataclass(frozen=True)
class SchedulingOptions(TextLimitOptions, panel="Scheduling"):
    """Limits of the server."""

    max_waiting: int = option(64, "Requests that wait; more are answered with 429.", min=0)
    request_timeout: float | None = option(None, "Seconds after which a request is given up.", min=0.1)
    drain_timeout: float = option(30.0, "Seconds that texts have to end when the server is stopped.", min=0)
    kv_cache_memory_bytes: int | None = option(None, "Of keys and values. Default: a quarter of the device's memory.", min=1)


@dataclass(frozen=True)
class ReplicaOptions(OptionGroup, panel="Ray"):
    """How many replicas answer, and where. ValueError for numbers that contradict each other, and without --ray."""

    ray: bool = option(False, "Serve by replicas on Ray Serve.", "--ray")
    ray_address: str | None = option(None, RAY_ADDRESS)
    replicas: int | None = option(None, "Models that answer, always as many. Default: 1.", min=1)
    min_replicas: int | None = option(None, "Fewest of them, if their number follows the requests. Default: 1.", min=1)
    max_replicas: int | None = option(None, "Most of them, if their number follows the requests. Default: the fewest.", min=1)
    cpus_per_replica: int | None = option(None, "CPUs that each of them has. Default: 1.", min=1)
    gpus_per_replica: int | None = option(None, "GPUs that each of them has. Default: 1 for --device cuda, else none.", min=0)

    def __post_init__(self) -> None:
        if not self.ray and not self.is_default:
            raise ValueError("--ray-address and the options of replicas need --ray")
        if self.replicas is not None and (self.min_replicas, self.max_replicas) != (None, None):
            raise ValueError("--replicas is a number that stays: leave it out, or --min-replicas and --max-replicas")
        low, high = self.range
        if low > high:
            raise ValueError(f"--min-replicas {low} is more than --max-replicas {high}")

    @property
    def range(self) -> tuple[int, int]:
        """The smallest and the largest number of replicas."""
        low = self.replicas or self.min_replicas or 1
        return low, self.replicas or self.max_replicas or low


def serve(
    *,
    method: MethodOptions,
    server: ServerOptions,
    scheduling: SchedulingOptions,
    replicas: ReplicaOptions,
    model: GenerationModelOptions,
) -> None:
    """Serve a model over HTTP, as OpenAI's API."""
    chosen = method.parse_for(None if replicas.ray else model.model)  # replicas may have other folders
    expect_packages("a server", "uvicorn", "fastapi", "sse_starlette")
    from skipstone.serving.settings import ServerSettings

    settings = ServerSettings(server.served_model_name or model.name, chosen, *astuple(scheduling))
    if replicas.ray:
        _serve_replicas(model, settings, server, replicas)
    else:
        _serve_here(model.load, settings, server)


def expect_packages(what: str, *modules: str) -> None:
    """ImportError without the packages that something is made of."""
    for module in modules:
        installed(module, f"{what} needs {module.replace('_', '-')}", "serve")


def _serve_replicas(
    model: GenerationModelOptions, settings: "ServerSettings", server: ServerOptions, replicas: ReplicaOptions
) -> None:
    """Serve by replicas on Ray Serve, until somebody ends them."""
    if server.port == 0:
        raise ValueError("--port 0 is no port that Ray Serve can listen at: name one that is free")
    installed("ray.serve", "--ray needs Ray Serve", "ray")
    from skipstone.serving.ray.cluster import NodeShare, weight_bytes
    from skipstone.serving.ray.serve import ReplicaSettings, listen

    model = model.with_absolute_path()
    default_gpus = int(model.device.startswith("cuda"))
    gpus = default_gpus if replicas.gpus_per_replica is None else replicas.gpus_per_replica
    share = NodeShare(replicas.cpus_per_replica or 1, gpus, weight_bytes(model.model))
    endpoint = server.host, server.port, server.key, server.log_format
    listen(model.load, settings, ReplicaSettings(*replicas.range, share, replicas.ray_address, *endpoint))


def _serve_here(load: Callable[[], tuple[Any, Any]], settings: "ServerSettings", server: ServerOptions) -> None:
    """Serve until somebody ends the server. If the model failed, leave with the exit code of its error."""
    from skipstone.serving.sockets import bound_socket

    with bound_socket(server.host, server.port) as socket:
        from skipstone.serving import logs, tracing
        from skipstone.serving.run_server import listen
        from skipstone.serving.server import Server

        logs.set_up(server.log_format)
        tracing.set_up()
        served = Server(load, settings)
        is_whole = listen(served, socket, server.key)
    if not is_whole:
        raise typer.Exit(USER_ERROR if isinstance(served.failure, (ValueError, OSError)) else DEFECT)
