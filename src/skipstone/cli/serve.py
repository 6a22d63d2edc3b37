"""`skipstone serve`: an OpenAI-compatible server."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import typer

from skipstone.cli import options, terminal
from skipstone.cli.options import grouped

API_KEY = "SKIPSTONE_API_KEY"
"""The environment variable of --api-key, which other users of a machine do not see."""
OF_LOADING = ("engine", "quantize", "kv_dtype", "trust_remote_code", "generation_config", "override_generation_config")
LOG_FORMATS = ("text", "json")  # those of skipstone.serving.logs, which would import starlette


def _known_format(log_format: str) -> str:
    options.one_of("--log-format", log_format, LOG_FORMATS)
    return log_format


KvCacheMemoryBytes = Annotated[
    int | None,
    grouped(
        "Scheduling",
        "Bytes that keys and values of all methods' rows may take. Default: a quarter of the memory of the model's device.",
        min=1,
    ),
]
LogFormat = Annotated[
    str, grouped("Server", "text or json: what the lines of the log on stderr are; requests have one.", callback=_known_format)
]
ApiKey = Annotated[str | None, grouped("Server", f"What clients have to send. Default: the environment variable {API_KEY}.")]
ServedModelName = Annotated[str | None, grouped("Server", "What clients call the model. Default: the name it was loaded by.")]
RequestTimeout = Annotated[float | None, grouped("Scheduling", "Seconds after which a request is given up.", min=0.1)]
DrainTimeout = Annotated[float, grouped("Scheduling", "Seconds that texts have to end when the server is stopped.", min=0)]
Ray = Annotated[bool, grouped("Ray", "Serve by replicas on Ray Serve.", "--ray")]
Replicas = Annotated[int | None, grouped("Ray", "Models that answer, always as many. Default: 1.", min=1)]
MinReplicas = Annotated[
    int | None, grouped("Ray", "Fewest of them, where their number follows the requests. Default: 1.", min=1)
]
MaxReplicas = Annotated[
    int | None, grouped("Ray", "Most of them, where their number follows the requests. Default: the fewest.", min=1)
]
CpusPerReplica = Annotated[int | None, grouped("Ray", "CPUs that each of them has. Default: 1.", min=1)]
GpusPerReplica = Annotated[
    int | None, grouped("Ray", "GPUs that each of them has. Default: 1 for --device cuda, else none.", min=0)
]


def serve(
    model: options.Model = None,
    method: options.MethodText = None,
    speculative_config: options.MethodConfig = None,
    host: Annotated[str, grouped("Server", "The address to listen at. Others than this machine reach 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, grouped("Server", "The port; 0 for one that is free.", min=0, max=65535)] = 8000,
    api_key: ApiKey = None,
    served_model_name: ServedModelName = None,
    generation_config: options.GenerationConfig = "auto",
    override_generation_config: options.OverrideGenerationConfig = None,
    max_num_seqs: options.MaxNumSeqs = 8,
    max_model_len: options.MaxModelLen = None,
    max_waiting: Annotated[int, grouped("Scheduling", "Requests that wait; more are answered with 429.", min=0)] = 64,
    request_timeout: RequestTimeout = None,
    drain_timeout: DrainTimeout = 30.0,
    kv_cache_memory_bytes: KvCacheMemoryBytes = None,
    log_format: LogFormat = "text",
    ray: Ray = False,
    ray_address: options.RayAddress = None,
    replicas: Replicas = None,
    min_replicas: MinReplicas = None,
    max_replicas: MaxReplicas = None,
    cpus_per_replica: CpusPerReplica = None,
    gpus_per_replica: GpusPerReplica = None,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "auto",
    quantize: options.Quantize = "none",
    kv_dtype: options.KvDtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's API."""
    name = served_model_name or model or "skipstone-nano"
    asked = options.checked_method(None if ray else model, method, speculative_config)  # replicas may have other folders
    setup = {name: value for name, value in locals().items() if name in OF_LOADING}
    model = _absolute(model) if ray else model  # replicas have another working directory
    load = partial(options.load, model, dtype, device, **setup, keep_weights=False)
    settings = name, asked, max_num_seqs, max_model_len, max_waiting, request_timeout, drain_timeout, kv_cache_memory_bytes
    place = host, port, api_key or os.environ.get(API_KEY)
    numbers = replicas, min_replicas, max_replicas
    if ray:
        gpus = int(device.startswith("cuda")) if gpus_per_replica is None else gpus_per_replica
        _replicate(load, settings, place, log_format, numbers, (cpus_per_replica or 1, gpus, model, ray_address))
        return
    if any(one is not None for one in (ray_address, *numbers, cpus_per_replica, gpus_per_replica)):
        raise ValueError("--ray-address and the options of replicas need --ray")
    _listen(load, settings, place, log_format)


def _absolute(model: str | None) -> str | None:
    """The absolute path of a folder; a hub id is returned unchanged."""
    return os.path.abspath(model) if model is not None and os.path.exists(model) else model


def _least_and_most(replicas: int | None, least: int | None, most: int | None) -> tuple[int, int]:
    """How many replicas there are at least and at most."""
    if replicas is not None and (least is not None or most is not None):
        raise ValueError("--replicas is a number that stays: leave it out, or --min-replicas and --max-replicas")
    found = replicas or least or 1, replicas or most or least or 1
    if found[0] > found[1]:
        raise ValueError(f"--min-replicas {found[0]} is more than --max-replicas {found[1]}")
    return found


def _expect_packages() -> None:
    """ImportError without what a server is made of."""
    from skipstone.utils.extras import installed

    for module in ("uvicorn", "fastapi", "sse_starlette"):
        installed(module, f"a server needs {module.replace('_', '-')}", "serve")


def _replicate(
    load: Callable[[], tuple[Any, Any]],
    settings: Sequence[Any],
    place: tuple[str, int, str | None],
    log_format: str,
    numbers: tuple[int | None, int | None, int | None],
    share: tuple[int, int, str | None, str | None],
) -> None:
    """Replicas on Ray Serve, until somebody ends them. numbers: --replicas, --min-replicas, --max-replicas. share: CPUs and
    GPUs of each, the model, the address of a cluster."""
    from skipstone.utils.extras import installed

    least, most = _least_and_most(*numbers)
    if place[1] == 0:
        raise ValueError("--port 0 is no port that Ray Serve can listen at: name one that is free")
    _expect_packages()
    installed("ray.serve", "--ray needs Ray Serve", "ray")
    from skipstone.serving.ray.cluster import Share, weights
    from skipstone.serving.ray.serve import Place, Scale, listen
    from skipstone.serving.settings import ServerSettings

    cpus, gpus, model, address = share
    scale = Scale(least, most, Share(cpus, gpus, weights(model)), address)
    listen(load, ServerSettings(*settings), scale, Place(*place), log_format)


def _listen(
    load: Callable[[], tuple[Any, Any]], settings: Sequence[Any], place: tuple[str, int, str | None], log_format: str
) -> None:
    """Until somebody ends it; with a status that says so, where there is no model any more. settings: as those of a server."""
    _expect_packages()
    from skipstone.serving.sockets import bound_socket

    host, port, api_key = place
    with bound_socket(host, port) as at:
        from skipstone.serving import logs, tracing
        from skipstone.serving.run_server import listen
        from skipstone.serving.server import Server
        from skipstone.serving.settings import ServerSettings

        logs.set_up(log_format)
        tracing.set_up()
        server = Server(load, ServerSettings(*settings))
        whole = listen(server, at, api_key)
    if not whole:
        raise typer.Exit(terminal.USER_ERROR if isinstance(server.failure, (ValueError, OSError)) else terminal.DEFECT)
