"""Errors in OpenAI's shape: what clients of theirs read."""

from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "invalid_request_error", 413: "invalid_request_error"}
KINDS |= {429: "rate_limit_error", 503: "service_unavailable_error", 504: "timeout_error"}
LONGEST = 500
"""Characters of a message: what a client sent is not sent back whole."""


def body(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message[:LONGEST], "type": kind, "param": param, "code": status}}


def response(message: str, status: int, param: str | None = None, retry_after: int | None = None) -> JSONResponse:
    """The response of an error."""
    headers = {} if retry_after is None else {"Retry-After": str(retry_after)}
    return JSONResponse(body(message, status, param), status_code=status, headers=headers)


def invalid(error: RequestValidationError) -> JSONResponse:
    """The response to a body that is none: the first thing that is wrong with it, of a field of several forms that of the one
    that came furthest."""
    first = max(error.errors(), key=lambda one: len(one["loc"]))
    place = [str(part) for part in first["loc"] if part != "body" and "[" not in str(part)]
    name = ".".join(place) or None
    if first["type"] == "extra_forbidden":
        return response(f"{name}: this field is not supported", 400, name)
    if first["type"] in ("json_invalid", "model_attributes_type"):
        return response("the body is no JSON object", 400)
    return response(f"{name}: {first['msg']}" if name else str(first["msg"]), 400, name)
