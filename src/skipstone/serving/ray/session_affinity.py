"""Session affinity: which conversation a request belongs to. All its requests go to the replica that holds their prefix."""

import json
from collections.abc import Iterable
from typing import Any

from skipstone.utils.files import digest

HEADER = "x-session-id"
"""The header with which a client names its conversation."""
FIELDS = ("prompt_cache_key", "user")
"""Fields of a body that name the conversation. The first one counts."""
ID_LENGTH = 32
"""Characters of a conversation's id."""
PREFIX_LENGTH = 256
"""Characters, or token ids, of a prompt that name its conversation. A shorter prompt names none, because it may grow."""


def session_id(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> str:
    """An id of the conversation, 32 characters, the same for all its requests; "" if the request names none.

    The header counts before the fields, and these before the text. In a chat, the messages up to the first one of the user name
    the conversation, because later requests repeat them. headers: names in lower case, and values. body: as it was sent."""
    if value := next((value for name, value in headers if name == HEADER.encode() and value), b""):
        return digest(["header", value.decode("latin-1")], ID_LENGTH)
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(found, dict):
        return ""
    for field in FIELDS:
        if isinstance(found.get(field), str) and found[field]:
            return digest([field, found[field]], ID_LENGTH)
    prefix = _prefix(found)
    return "" if prefix is None else digest(["text", prefix], ID_LENGTH)


def _prefix(body: dict[str, Any]) -> Any:
    """The beginning of the conversation that later requests repeat; None if there is none."""
    if isinstance(turns := body.get("messages"), list):
        return _until_user(turns)
    if "input" in body:
        turns = body["input"]
        first = _until_user(turns) if isinstance(turns, list) else turns
        return None if first is None else [body.get("instructions"), first]
    prompt = body.get("prompt")
    return prompt[:PREFIX_LENGTH] if isinstance(prompt, str | list) and len(prompt) >= PREFIX_LENGTH else None


def _until_user(turns: list[Any]) -> list[Any] | None:
    """Role and content of the turns up to the first one of the user."""
    first = []
    for turn in turns:
        if not isinstance(turn, dict):
            return None
        first.append([turn.get("role"), turn.get("content")])
        if turn.get("role") == "user":
            return first
    return None
