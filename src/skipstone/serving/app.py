"""The HTTP routes: OpenAI's, vLLM's `/tokenize` and `/detokenize`, health, metrics."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from sse_starlette.sse import EventSourceResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from skipstone import __version__
from skipstone.serving import errors, logs, playground, tracing
from skipstone.serving.answers import Answer
from skipstone.serving.middleware import AccessMiddleware, ErrorMiddleware
from skipstone.serving.pending_request import PendingRequest, RequestError
from skipstone.serving.request_record import RecordMiddleware
from skipstone.serving.responses import ResponseBody, ResponseFormatter
from skipstone.serving.schemas import ChatBody, CompletionBody, DetokenizeBody, GenerationBody, TokenizeBody
from skipstone.serving.server import Server, Updates, unless_disconnected

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
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(AccessMiddleware, api_key=api_key)
    reporters = [server.metrics.request, *tracing.reporters(), logs.request]
    app.add_middleware(RecordMiddleware, model=server.settings.name, reporters=reporters)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    """Answer every error in OpenAI's shape, without names of the server's files."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return errors.invalid(error, request.headers.get("content-type"))

    @app.exception_handler(RequestError)
    async def refused(_: Request, error: RequestError) -> Response:
        return errors.request_error(error)

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, error: HTTPException) -> Response:
        said = {404: f"there is no {request.url.path}", 405: f"{request.method} is not what {request.url.path} takes"}
        if error.detail == UNREADABLE_BODY:
            said[400] = "the body cannot be read as JSON: it is no UTF-8, or is nested too deeply"
        return errors.response(said.get(error.status_code, str(error.detail)), error.status_code)


def _add_text_routes(app: FastAPI, server: Server) -> None:
    """Add the routes that answer with text or tokens."""

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _answer(server, server.parser.parse_completion, body, request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _answer(server, server.parser.parse_chat, body, request, chat=True)

    @app.post("/v1/responses")
    async def responses(body: ResponseBody, request: Request) -> Response:
        return await _respond(server, body, request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        _check_model(server, body.model)
        tokens = await server.parse(server.parser.tokenize, body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": server.parser.max_model_len}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        _check_model(server, body.model)
        size = server.parser.model.embeddings
        if any(not 0 <= token < size for token in body.tokens):
            raise RequestError(400, f"tokens: the vocabulary has {size} entries, 0 to {size - 1}")
        return {"prompt": await server.run_on_text_thread(server.tokenizer.decode, body.tokens)}


def _check_model(server: Server, model: str | None) -> None:
    if model is not None and model != server.settings.name:
        raise RequestError(404, f"there is no model {model[:100]!r} here, but {server.settings.name!r}")


async def _answer(
    server: Server, parse: Callable[[Any], list[PendingRequest]], body: GenerationBody, request: Request, *, chat: bool
) -> Response:
    """An answer, as a stream or at once."""
    _check_model(server, body.model)
    if body.stream_options is not None and not body.stream:
        raise RequestError(400, "stream_options needs stream=true")
    answer, updates = await server.answer(parse, body, chat=chat)
    if body.stream:
        return Stream(_events(answer, updates, body), server, answer)
    try:
        all_read = await unless_disconnected(_wait_for_disconnect(request), _read_all(updates))
    finally:
        server.abandon(answer)
    return Response(status_code=499) if all_read is None else JSONResponse(answer.body(body.return_metrics))


async def _respond(server: Server, body: ResponseBody, request: Request) -> Response:
    """An answer of /v1/responses."""
    _check_model(server, body.model)
    chats = server.parser.has_chat_template
    try:
        generation_body = body.generation_body(chats)
    except ValueError as error:
        raise RequestError(400, str(error)) from None
    answer, updates = await server.answer(server.parser.parser_of(chats), generation_body, chat=chats)
    formatter = ResponseFormatter(answer, body)
    if body.stream:
        events = ({"event": one["type"], "data": _json(one)} async for one in formatter.events(updates))
        return Stream(events, server, answer)
    try:
        all_read = await unless_disconnected(_wait_for_disconnect(request), _read_all(updates))
    finally:
        server.abandon(answer)
    return Response(status_code=499) if all_read is None else JSONResponse(formatter.complete_body())


async def _read_all(updates: Updates) -> bool:
    """Wait until all is written."""
    async with aclosing(updates):
        async for _ in updates:
            pass
    return True


class Stream(EventSourceResponse):
    """Sends the events of an answer until the last one, or until the client has gone."""

    def __init__(self, events: AsyncIterator[Any], server: Server, answer: Answer) -> None:
        super().__init__(events, ping=PING_SECONDS, sep="\n")
        self._server, self._answer = server, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._server.open_streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._server.open_streams -= 1
            self._server.abandon(self._answer)


async def _events(answer: Answer, updates: Updates, body: GenerationBody) -> AsyncIterator[str]:
    """The chunks of an answer while it is written."""
    async with aclosing(updates):
        try:
            for chunk in answer.first_chunks():
                yield _json(chunk)
            async for update in updates:
                if (prompt := answer.prompt_chunk(update[0])) is not None:
                    yield _json(prompt)
                if (chunk := answer.chunk(*update, body.stream_speculative)) is not None:
                    yield _json(chunk)
            if body.tells_usage:
                yield _json(answer.usage_chunk(body.return_metrics))
        except RequestError as error:
            yield _json(errors.request_error_body(error))
    yield "[DONE]"


async def _wait_for_disconnect(request: Request) -> None:
    """Return when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


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
        return Response(server.metrics.text(), media_type=server.metrics.content_type)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(server)]}

    @app.get("/v1/models/{model:path}")  # an id may have slashes
    async def retrieve(model: str) -> dict[str, Any]:
        _check_model(server, model)
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
