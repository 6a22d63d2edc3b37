"""One request of a batch becomes one line of the output: the server's answer, as a function of the request alone.

Ids are made of the request's hash, and times are 0. Figures that depend on other requests are left out: reused prompt tokens
and accepted drafts.
"""

from typing import Any

from pydantic import ValidationError

from skipstone.serving.api_schemas import ChatBody, CompletionBody
from skipstone.serving.batch_files.journal import SUCCESS, OutputLine
from skipstone.serving.batch_files.request_lines import ID_DIGITS, RequestLine
from skipstone.serving.errors import RequestError, error_body, invalid_body
from skipstone.serving.responses_api import ResponseBody
from skipstone.serving.server import Server, read_all
from skipstone.utils.files import digest

BODIES: dict[str, type[CompletionBody | ChatBody | ResponseBody]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponseBody,
}
"""url -> type of its body."""
SERVER_FIELDS = ("stream", "stream_options", "stream_speculative", "return_metrics")
"""Fields that a batch refuses: nobody reads a stream, and times differ from run to run."""


class ModelThreadError(RuntimeError):
    """The model's thread has ended by an error: no further line can be answered."""


async def answer_line(server: Server, line: RequestLine) -> OutputLine:
    """The line of the output. ModelThreadError if the server writes nothing any more, which is no failure of the line."""
    try:
        status, body = SUCCESS, await _answer(server, line)
    except (ValidationError, RequestError) as error:
        refusal = error if isinstance(error, RequestError) else invalid_body(error.errors())
        if isinstance(error, RequestError) and server.health[0] != "ready":
            raise ModelThreadError(str(error)) from error
        status, body = refusal.status, error_body(refusal)
    response = {"status_code": status, "request_id": f"req_{line.digest[:ID_DIGITS]}", "body": body}
    return line.output(response)


def is_worth_retrying(answer: OutputLine) -> bool:
    """Whether an answer has an error that another request may have caused, because both were in one step or process."""
    response = answer["response"]
    return response is None or response["status_code"] >= 500 or response["status_code"] == 429


async def _answer(server: Server, line: RequestLine) -> dict[str, Any]:
    """The body of the answer. ValidationError and RequestError, as in a server."""
    completion, updates = await server.answer(_parse_body(line), seed=line.seed)
    await read_all(updates)
    completion.created = 0
    completion.set_id(line.digest[:ID_DIGITS])
    body = completion.json_body()
    usage = body["usage"]
    usage.pop("prompt_tokens_details", None)
    usage.pop("completion_tokens_details", None)
    if "input_tokens_details" in usage:  # which OpenAI's clients expect
        usage["input_tokens_details"] = {"cached_tokens": 0}
    for place, choice in enumerate(body.get("choices", ())):
        for number, call in enumerate(choice.get("message", {}).get("tool_calls", ())):
            call["id"] = f"call_{digest([line.digest, place, number], ID_DIGITS)}"
    return body


def _parse_body(line: RequestLine) -> CompletionBody | ChatBody | ResponseBody:
    kind = BODIES.get(line.url) if isinstance(line.url, str) else None
    if kind is None:
        raise RequestError(404, f"there is no {ascii(line.url)[:100]} in a batch, but {', '.join(BODIES)}")
    if line.method != "POST":
        raise RequestError(405, f"{ascii(line.method)[:100]} is not what {line.url} takes")
    if not isinstance(line.body, dict):
        raise RequestError(400, "the body is no JSON object")
    if refused := [name for name in SERVER_FIELDS if line.body.get(name)]:
        raise RequestError(400, f"{refused[0]}: a batch has none; leave it out")
    return kind.model_validate(line.body)
