"""Errors in OpenAI's shape."""

from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

TYPES = {400: "invalid_request_error", 401: "authentication_error", 429: "rate_limit_error"}
TYPES |= {503: "service_unavailable_error", 504: "timeout_error"}
"""HTTP status -> OpenAI's type of error."""
MAX_MESSAGE_CHARACTERS = 500
"""Maximum length of a message, because it may quote what the client sent."""


class RequestError(Exception):
    """A refused request, with the HTTP status of the answer.

    retry_after: seconds after which the client may ask again. code: OpenAI's word for the reason, by default the status. param:
    name of the wrong field."""

    def __init__(
        self, status: int, message: str, *, retry_after: int | None = None, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.retry_after, self.code, self.param = status, retry_after, code, param


def error_body(error: RequestError) -> dict[str, Any]:
    """The JSON of an error."""
    kind = TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    message, code = str(error)[:MAX_MESSAGE_CHARACTERS], error.code or error.status
    return {"error": {"message": message, "type": kind, "param": error.param, "code": code}}


def error_response(error: RequestError) -> JSONResponse:
    """The response with an error."""
    headers = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return JSONResponse(error_body(error), status_code=error.status, headers=headers)


def invalid_body(mistakes: Sequence[Any], content_type: str | None = "application/json") -> RequestError:
    """The error for an invalid body: its first mistake. If a field may have several forms, the form that was followed furthest
    counts. mistakes: as pydantic lists them. content_type: header of the request, None without one."""
    first = max(mistakes, key=lambda one: len(one["loc"]))
    name = ".".join(str(part) for part in first["loc"] if part != "body" and "[" not in str(part)) or None
    message, kind = str(first["msg"]), first["type"]
    if kind == "extra_forbidden":
        message = f"{name}: this field is not supported"
    elif kind == "model_attributes_type" and "json" not in (content_type or ""):
        name, message = None, f"the header Content-Type must be application/json, found {content_type or 'none'}"
    elif kind in ("json_invalid", "model_attributes_type"):
        name, message = None, "the body is no JSON object"
    elif kind == "missing" and name is None:
        message = "the request has no body; send a JSON object"
    elif name is not None:
        message = f"{name}: {message}"
    return RequestError(400, message, param=name)
