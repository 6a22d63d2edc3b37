"""`skipstone serve`: an OpenAI-compatible server."""

import os
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from skipstone.cli import options
from skipstone.cli.options import grouped

API_KEY = "SKIPSTONE_API_KEY"
"""The environment variable of --api-key, which other users of a machine do not see."""
LOG_FORMATS = ("text", "json")  # those of skipstone.serving.logs, which would import starlette


def _known_format(log_format: str) -> str:
    if log_format not in LOG_FORMATS:
        raise ValueError(f"--log-format must be one of {', '.join(LOG_FORMATS)}, found {log_format!r}")
    return log_format


LogFormat = Annotated[
    str, grouped("Server", "text or json: what the lines of the log on stderr are; requests have one.", callback=_known_format)
]


def serve(
    model: options.Model = None,
    method: options.MethodText = None,
    speculative_config: options.MethodConfig = None,
    host: Annotated[str, grouped("Server", "The address to listen at. Others than this machine reach 0.0.0.0.")] = "127.0.0.1",
    port: Annotated[int, grouped("Server", "The port; 0 for one that is free.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        str | None, grouped("Server", f"What clients have to send. Default: the environment variable {API_KEY}.")
    ] = None,
    served_model_name: Annotated[
        str | None, grouped("Server", "What clients call the model. Default: the name it was loaded by.")
    ] = None,
    max_num_seqs: Annotated[int, grouped("Scheduling", "Texts that are written at a time.", min=1, max=1024)] = 8,
    max_model_len: Annotated[
        int | None, grouped("Scheduling", "Most tokens of a text, prompt included. Default: the model's, 4096 at most.", min=2)
    ] = None,
    max_waiting: Annotated[int, grouped("Scheduling", "Requests that wait; more are answered with 429.", min=0)] = 64,
    request_timeout: Annotated[
        float | None, grouped("Scheduling", "Seconds after which a request is given up.", min=0.1)
    ] = None,
    drain_timeout: Annotated[
        float, grouped("Scheduling", "Seconds that texts have to end when the server is stopped.", min=0)
    ] = 30.0,
    log_format: LogFormat = "text",
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "auto",
    quantize: options.Quantize = "none",
    kv_dtype: options.KvDtype = None,
    trust_remote_code: options.TrustRemoteCode = False,
    debug: options.Debug = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's API."""
    asked = options.asked_method(method, speculative_config)
    setup = {"engine": engine, "quantize": quantize, "kv_dtype": kv_dtype, "trust_remote_code": trust_remote_code}

    def load() -> tuple[Any, Any]:
        return options.load(model, dtype, device, **setup, keep_weights=False)

    name = served_model_name or model or "skipstone-nano"
    settings = name, asked, max_num_seqs, max_model_len, max_waiting, request_timeout, drain_timeout
    _listen(load, settings, api_key or os.environ.get(API_KEY), host, port, log_format)


def _listen(
    load: Callable[[], tuple[Any, Any]], settings: Sequence[Any], api_key: str | None, host: str, port: int, log_format: str
) -> None:
    """Until somebody ends it. settings: as those of a server."""
    from skipstone.extras import installed

    for module in ("uvicorn", "fastapi", "sse_starlette"):
        installed(module, f"a server needs {module.replace('_', '-')}", "serve")
    import uvicorn

    from skipstone.serving import logs, tracing
    from skipstone.serving.app import make_app
    from skipstone.serving.server import Server, Settings

    logs.set_up(log_format)
    tracing.set_up()
    server = Server(load, Settings(*settings))
    wait = int(server.settings.drain) + 1
    app = make_app(server, api_key)
    uvicorn.run(app, host=host, port=port, log_config=None, access_log=False, timeout_graceful_shutdown=wait)
