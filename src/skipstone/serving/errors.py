"""Errors in OpenAI's shape."""

from typing import TYPE_CHECKING, Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

if TYPE_CHECKING:  # it imports torch, which the front of several replicas does without
    from skipstone.serving.pending_request import RequestError

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error", 413: "invalid_request_error"}
KINDS |= {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
MAX_MESSAGE_CHARACTERS = 500
"""Maximum length of a message, because it may quote what the client sent."""


def body(message: str, status: int, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error. code: OpenAI's word for the reason, by default the status."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message[:MAX_MESSAGE_CHARACTERS], "type": kind, "param": param, "code": code or status}}


def request_error_body(error: "RequestError") -> dict[str, Any]:
    """The JSON of a request that is refused."""
    return body(str(error), error.status, code=error.code)


def request_error(error: "RequestError") -> JSONResponse:
    """The response to a request that is refused."""
    return response(str(error), error.status, None, error.retry_after, error.code)


def response(
    message: str, status: int, param: str | None = None, retry_after: int | None = None, code: str | None = None
) -> JSONResponse:
    """The response of an error."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return JSONResponse(body(message, status, param, code), status_code=status, headers=headers)


def invalid(error: RequestValidationError, content_type: str | None = "application/json") -> JSONResponse:
    """The response to an invalid body: its first mistake. If a field may have several forms, the form that was followed
    furthest counts. content_type: header of the request, None without one."""
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    place = [str(part) for part in first["loc"] if part != "body" and "[" not in str(part)]
    name = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        return response(f"{name}: this field is not supported", 400, name)
    if first["type"] == "model_attributes_type" and "json" not in (content_type or ""):
        found = "none" if content_type is None else content_type
        return response(f"the header Content-Type must be application/json, found {found}", 400)
    if first["type"] in ("json_invalid", "model_attributes_type"):
        return response("the body is no JSON object", 400)
    if first["type"] == "missing" and name is None:
        return response("the request has no body; send a JSON object", 400)
    return response(f"{name}: {first['msg']}" if name else str(first["msg"]), 400, name)
