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

UNTRACED: Any = {"tracing": False, "metrics": False, "logs": False}
"""Of FastAPI: its own telemetry, which newer versions have, would add a second span and tell what exceptions say."""
UNREADABLE_BODY = "There was an error parsing the body"
"""What FastAPI says of a body that it cannot decode at all."""
PING = 15
"""Seconds after which a silent stream sends a comment, so that nothing on the way closes it."""


def make_app(server: Server, api_key: str | None = None) -> FastAPI:
    """The application. api_key: that clients have to send; None for none."""

    @asynccontextmanager
    async def life(app: FastAPI) -> AsyncIterator[None]:
        loading = asyncio.create_task(server.start())
        yield
        loading.cancel()
        await server.stop()
        await asyncio.to_thread(tracing.flush)

    app = FastAPI(title="skipstone", version=__version__, lifespan=life, docs_url=None, redoc_url=None, telemetry=UNTRACED)
    _errors(app)
    _texts(app, server)
    _about(app, server)
    playground.add(app)
    app.add_middleware(ErrorMiddleware)
    app.add_middleware(AccessMiddleware, api_key=api_key)
    reporters = [server.metrics.request, *tracing.reporters(), logs.request]
    app.add_middleware(RecordMiddleware, model=server.settings.name, reporters=reporters)
    return app


def _errors(app: FastAPI) -> None:
    """Every error in OpenAI's shape, without a word of the server's files."""

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


def _texts(app: FastAPI, server: Server) -> None:
    """The routes that write."""

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await _answered(server, server.parser.completion, body, request, chat=False)

    @app.post("/v1/chat/completions")
    async def chat(body: ChatBody, request: Request) -> Response:
        return await _answered(server, server.parser.chat, body, request, chat=True)

    @app.post("/v1/responses")
    async def responses(body: ResponseBody, request: Request) -> Response:
        return await _responded(server, body, request)

    @app.post("/tokenize")
    async def tokenize(body: TokenizeBody) -> dict[str, Any]:
        _known(server, body.model)
        tokens = await server.asked(server.parser.tokens, body)
        return {"tokens": tokens, "count": len(tokens), "max_model_len": server.parser.capacity}

    @app.post("/detokenize")
    async def detokenize(body: DetokenizeBody) -> dict[str, Any]:
        _known(server, body.model)
        size = server.parser.model.embeddings
        if any(not 0 <= token < size for token in body.tokens):
            raise RequestError(400, f"tokens: the vocabulary has {size} entries, 0 to {size - 1}")
        return {"prompt": await server.run_on_text_thread(server.tokenizer.decode, body.tokens)}


def _known(server: Server, model: str | None) -> None:
    if model is not None and model != server.settings.name:
        raise RequestError(404, f"there is no model {model[:100]!r} here, but {server.settings.name!r}")


async def _answered(
    server: Server, ask: Callable[[Any], list[PendingRequest]], body: GenerationBody, request: Request, *, chat: bool
) -> Response:
    """An answer, as a stream or at once."""
    _known(server, body.model)
    if body.stream_options is not None and not body.stream:
        raise RequestError(400, "stream_options needs stream=true")
    answer, updates = await server.answer(ask, body, chat=chat)
    if body.stream:
        return Stream(_events(answer, updates, body), server, answer)
    try:
        found = await unless_disconnected(_gone(request), _whole(answer, updates, body))
    finally:
        server.abandon(answer)
    return Response(status_code=499) if found is None else JSONResponse(found)


async def _responded(server: Server, body: ResponseBody, request: Request) -> Response:
    """The same for /v1/responses."""
    _known(server, body.model)
    chats = server.parser.chats
    try:
        sampled = body.sampled(chats)
    except ValueError as error:
        raise RequestError(400, str(error)) from None
    answer, updates = await server.answer(server.parser.of(chats), sampled, chat=chats)
    told = ResponseFormatter(answer, body)
    if body.stream:
        events = ({"event": one["type"], "data": _told(one)} async for one in told.events(updates))
        return Stream(events, server, answer)
    try:
        ended = await unless_disconnected(_gone(request), _ended(updates))
    finally:
        server.abandon(answer)
    return Response(status_code=499) if ended is None else JSONResponse(told.whole())


async def _ended(updates: Updates) -> bool:
    """Waits until all is written."""
    async with aclosing(updates):
        async for _ in updates:
            pass
    return True


class Stream(EventSourceResponse):
    """Events of an answer until there are no more or the client has gone, which may be before the first one."""

    def __init__(self, events: AsyncIterator[Any], server: Server, answer: Answer) -> None:
        super().__init__(events, ping=PING, sep="\n")
        self._server, self._answer = server, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._server.open_streams += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._server.open_streams -= 1
            self._server.abandon(self._answer)


async def _whole(answer: Answer, updates: Updates, body: GenerationBody) -> dict[str, Any]:
    """An answer when it is all written."""
    await _ended(updates)
    return answer.whole(body.return_metrics)


async def _events(answer: Answer, updates: Updates, body: GenerationBody) -> AsyncIterator[str]:
    """An answer while it is written."""
    async with aclosing(updates):
        try:
            for chunk in answer.beginning():
                yield _told(chunk)
            async for update in updates:
                if (prompt := answer.prompt(update[0])) is not None:
                    yield _told(prompt)
                if (chunk := answer.chunk(*update, body.stream_speculative)) is not None:
                    yield _told(chunk)
            if body.tells_usage:
                yield _told(answer.ending(body.return_metrics))
        except RequestError as error:
            yield _told(errors.request_error_body(error))
    yield "[DONE]"


async def _gone(request: Request) -> None:
    """Returns when the client has gone."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _told(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _model(server: Server) -> dict[str, Any]:
    """The model, as OpenAI's API has it."""
    model = {"id": server.settings.name, "object": "model", "created": server.started, "owned_by": "skipstone"}
    return model | {"max_model_len": server.parser.capacity}


def _about(app: FastAPI, server: Server) -> None:
    """The routes that tell of the server."""

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
        _known(server, model)
        return _model(server)

    @app.get("/server_info")
    async def info() -> dict[str, Any]:
        parser, runner = server.parser, server.parser.model
        return {
            "version": __version__,
            "model": server.settings.name,
            "method": parser.default.spelled,
            "engine": runner.engine.name,
            "quantize": runner.engine.quantize,
            "max_model_len": parser.capacity,
            "has_chat_template": parser.chats,
            "max_num_seqs": server.settings.max_num_seqs,
        }
