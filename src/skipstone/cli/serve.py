"""`skipstone serve`: an OpenAI-compatible server."""

import os
from typing import Annotated, Any

import typer

from skipstone.cli import options
from skipstone.cli.options import grouped

API_KEY = "SKIPSTONE_API_KEY"
"""The environment variable of --api-key, which other users of a machine do not see."""


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
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    engine: options.Engine = "auto",
    quantize: options.Quantize = "none",
    kv_dtype: options.KvDtype = None,
    trust_remote_code: Annotated[bool, typer.Option("--trust-remote-code", help="Run the checkpoint's own code.")] = False,
    debug: options.Debug = False,
) -> None:
    """Serve a model over HTTP, as OpenAI's API."""
    asked = options.asked_method(method, speculative_config)
    setup = {"engine": engine, "quantize": quantize, "kv_dtype": kv_dtype, "trust_remote_code": trust_remote_code}

    def load() -> tuple[Any, Any]:
        return options.load(model, dtype, device, **setup, keep_weights=False)

    from skipstone.extras import installed

    uvicorn = installed("uvicorn", "a server needs uvicorn", "serve")
    installed("fastapi", "a server needs fastapi", "serve")
    installed("sse_starlette", "a server needs sse-starlette", "serve")
    from skipstone.serving.app import make_app
    from skipstone.serving.server import Server, Settings

    name = served_model_name or model or "skipstone-nano"
    settings = Settings(name, asked, max_num_seqs, max_model_len, max_waiting, request_timeout, drain_timeout)
    app = make_app(Server(load, settings), api_key or os.environ.get(API_KEY))
    uvicorn.run(app, host=host, port=port, log_level="info", access_log=False, timeout_graceful_shutdown=int(drain_timeout) + 1)
