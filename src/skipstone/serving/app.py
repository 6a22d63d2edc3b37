"""The HTTP routes: OpenAI's, vLLM's `/tokenize` and `/detokenize`, health, metrics."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sse_starlette.sse import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from skipstone import __version__
from skipstone.serving import logs, playground, tracing
from skipstone.serving.api_schemas import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from skipstone.serving.completions_api import Completion
from skipstone.serving.errors import RequestError, error_response, invalid_body
from skipstone.serving.middleware import AccessMiddleware
from skipstone.serving.request_record import RECORD, RecordMiddleware
from skipstone.serving.responses_api import ResponseBody
from skipstone.serving.server import Server, read_all

NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False}
"""FastAPI's own telemetry (newer versions) is off: it would add a second span and report what exceptions say."""
UNREADABLE_BODY = "There was an error parsing the body"
"""FastAPI's message for a body that it cannot decode."""
PING_SECONDS = 15
"""Time after which a silent stream sends a comment, so that no proxy closes it."""


def make_app(server: Server, api_key: str | None = None) -> FastAPI:
    """The application. api_key: clients must send it; None for no key."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(server.start())
        yield
        loading.cancel()
        await server.stop()
        await asyncio.to_thread(tracing.flush)

    app = FastAPI(title="skipstone", version=__version__, lifespan=life, docs_url=None, redoc_url=None, telemetry=NO_TELEMETRY)
    _add_error_handlers(app)
    _add_text_routes(app, server)
    _add_status_routes(app, server)
    playground.add(app)
    app.add_middleware(AccessMiddleware, api_key=api_key)
    reporters = [server.metrics.request, *tracing.reporters(), logs.request]
    app.add_middleware(RecordMiddleware, model=server.settings.name, reporters=reporters)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error in OpenAI's shape, without names of the server's files."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(invalid_body(error.errors(), request.headers.get("content-type")))

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return error_response(error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        messages = {404: f"there is no {path}", 405: f"{request.method} is not what {path} takes"}
        if error.detail == UNREADABLE_BODY:
            messages[400] = "the body cannot be read as JSON: it is no UTF-8, or is nested too deeply"
        return error_response(RequestError(error.status_code, messages.get(error.status_code, str(error.detail))))


def _add_text_routes(app: FastAPI, server: Server) -> None:
    """Add the routes that answer with text or tokens."""

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _answer(server, body, request)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _answer(server, body, request)

    @app.post("/v1/responses")
    async def responses(body: ResponseBody, request: Request) -> Response:
        return await _answer(server, body, request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        server.check_model(body.model)
        tokens = await server.parse(server.parser.tokenize, body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": server.parser.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        server.check_model(body.model)
        size = server.parser.model.embeddings
        if any(not 0 <= token < size for token in body.tokens):
            raise RequestError(400, f"tokens: the vocabulary has {size} entries, 0 to {size - 1}")
        return {"prompt": await server.parse(server.tokenizer.decode, body.tokens)}


async def _answer(server: Server, body: CompletionBody | ChatBody | ResponseBody, request: Request) -> Response:
    """An answer, as a stream or at once."""
    if not isinstance(body, ResponseBody) and body.stream_options is not None and not body.stream:
        raise RequestError(400, "stream_options needs stream=true")
    completion, updates = await server.answer(body)
    request.scope[RECORD].attach(completion)
    if body.stream:
        return Stream(completion.events(updates), server, completion)
    work = [asyncio.ensure_future(read_all(updates)), asyncio.ensure_future(_wait_for_disconnect(request))]
    try:
        await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        if not work[0].done():
            return Response(status_code=499)
        work[0].result()  # raises its error
        return JSONResponse(completion.json_body())
    finally:
        for one in work:
            one.cancel()
        server.abandon(completion)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Stream(EventSourceResponse):
    """Sends the events of an answer until the last one, or until the client has gone."""

    def __init__(self, events: AsyncIterator[Any], server: Server, completion: Completion) -> None:
        super().__init__(events, ping=PING_SECONDS, sep="\n")
        self._server, self._completion = server, completion

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._server.open_streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._server.open_streams -= 1
            self._server.abandon(self._completion)


def _model(server: Server) -> dict[str, Any]:
    """The model, as OpenAI's API has it."""
    model = {"id": server.settings.name, "object": "model", "created": server.started, "owned_by": "skipstone"}
    return model | {"max_model_len": server.parser.max_model_len}


def _add_status_routes(app: FastAPI, server: Server) -> None:
    """Add the routes about the server and its model."""

    @app.get("/health")
    async def health() -> Response:
        state, why = server.health
        body = {"status": state} | ({"reason": why} if state == "failed" else {})
        return JSONResponse(body, status_code=200 if state == "ready" else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(server.metrics_text(), media_type=server.metrics.content_type)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(server)]}

    @app.get("/v1/models/{model:path}")  # an id may have slashes
    async def retrieve(model: str) -> dict[str, Any]:
        server.check_model(model)
        return _model(server)

    @app.get("/server_info")
    async def info() -> dict[str, Any]:
        parser, runner = server.parser, server.parser.model
        return {
            "version": __version__,
            "model": server.settings.name,
            "method": parser.default_method.spelled,
            "engine": runner.engine.name,
            "quantize": runner.engine.quantize,
            "max_model_len": parser.max_model_len,
            "has_chat_template": parser.has_chat_template,
            "max_num_seqs": server.settings.max_num_seqs,
        }
