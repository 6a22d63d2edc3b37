"""One request of a batch to its answer: what the server answers over HTTP, as a function of the line alone.

Whatever a server's answer has of its own moment is replaced: ids are made of the line's hash, times are 0, and what depends on
the requests beside it (prompt tokens that a row had already, drafts that were accepted) is left out.
"""

import json
from contextlib import aclosing
from typing import Any

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from skipstone.serving import errors
from skipstone.serving.batch_files.journal import SUCCESS, Answer
from skipstone.serving.batch_files.lines import ID_DIGITS, Line
from skipstone.serving.pending_request import RequestError
from skipstone.serving.responses import ResponseBody, ResponseFormatter
from skipstone.serving.schemas import ChatBody, CompletionBody, GenerationBody, refuse_surrogates
from skipstone.serving.server import Server
from skipstone.utils.files import digest

BODIES: dict[str, type[CompletionBody | ChatBody | ResponseBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
}
"""url -> what a body is there."""
OF_A_SERVER = ("stream", "stream_options", "stream_speculative", "return_metrics")
"""Fields that a batch has no answer to: nobody reads along, and times are those of a run."""
DEFECT, TOO_MANY = 500, 429
"""From the first status on an error is none of the request's, nor is it with the second."""


class Died(RuntimeError):
    """The model's thread has ended by an error: no line can be answered any more."""


async def answered(server: Server, line: Line) -> Answer:
    """The line of the output. Died where the server writes nothing any more, which is no failure of the line."""
    try:
        status, body = SUCCESS, await _body(server, line)
    except ValidationError as error:
        response = errors.invalid(RequestValidationError(error.errors()))
        status, body = response.status_code, json.loads(bytes(response.body))
    except RequestError as error:
        if server.health[0] != "ready":
            raise Died(str(error)) from error
        status, body = error.status, errors.request_error_body(error)
    response = {"status_code": status, "request_id": f"req_{line.digest[:ID_DIGITS]}", "body": body}
    return {"id": line.id, "custom_id": line.custom_id, "response": response, "error": None}


def by_defect(answer: Answer) -> bool:
    """Whether it tells of an error that is none of the request's: another one may have ended the step that both were in."""
    status = answer["response"]["status_code"]
    return status >= DEFECT or status == TOO_MANY


async def _body(server: Server, line: Line) -> dict[str, Any]:
    """The body of the answer. ValidationError and RequestError, as in a server."""
    generation_body, body = _asked(server, line)
    chat = isinstance(generation_body, ChatBody)
    if generation_body.seed is None:
        generation_body = generation_body.model_copy(update={"seed": line.seed})
    answer, updates = await server.answer(server.parser.parser_of(chat), generation_body, chat=chat)
    try:
        async with aclosing(updates):
            async for _ in updates:
                pass
    finally:
        server.abandon(answer)
    answer.created = 0
    if isinstance(body, ResponseBody):
        formatter = ResponseFormatter(answer, body)
        formatter.id, formatter.item = f"resp_{line.digest[:ID_DIGITS]}", f"msg_{line.digest[:ID_DIGITS]}"
        return _of_the_line(formatter.complete_body(), line)
    answer.id = ("chatcmpl-" if chat else "cmpl-") + line.digest[:ID_DIGITS]
    return _of_the_line(answer.body(metrics=False), line)


def _asked(server: Server, line: Line) -> tuple[GenerationBody, CompletionBody | ChatBody | ResponseBody]:
    """What is to be written, and the body that asks for it."""
    try:
        refuse_surrogates([line.method, line.url])
    except ValueError as error:
        raise RequestError(400, f"method or url: {error}") from None
    kind = BODIES.get(line.url) if isinstance(line.url, str) else None
    if kind is None:
        raise RequestError(404, f"there is no {str(line.url)[:100]} in a batch, but {', '.join(BODIES)}")
    if line.method != "POST":
        raise RequestError(405, f"{str(line.method)[:100]} is not what {line.url} takes")
    if not isinstance(line.body, dict):
        raise RequestError(400, "the body is no JSON object")
    if unfit := [name for name in OF_A_SERVER if line.body.get(name)]:
        raise RequestError(400, f"{unfit[0]}: a batch has none; leave it out")
    body = kind.model_validate(line.body)
    if body.model not in (None, server.settings.name):
        raise RequestError(404, f"there is no model {body.model[:100]!r} here, but {server.settings.name!r}")
    if not isinstance(body, ResponseBody):
        return body, body
    try:
        return body.generation_body(server.parser.has_chat_template), body
    except ValueError as error:
        raise RequestError(400, str(error)) from None


def _of_the_line(body: dict[str, Any], line: Line) -> dict[str, Any]:
    """The same without what another run would have otherwise."""
    usage = body["usage"]
    usage.pop("prompt_tokens_details", None)
    usage.pop("completion_tokens_details", None)
    if "input_tokens_details" in usage:  # which OpenAI's clients expect
        usage["input_tokens_details"] = {"cached_tokens": 0}
    for place, choice in enumerate(body.get("choices", ())):
        for number, call in enumerate(choice.get("message", {}).get("tool_calls", ())):
            call["id"] = f"call_{digest([line.digest, place, number], ID_DIGITS)}"
    return body
