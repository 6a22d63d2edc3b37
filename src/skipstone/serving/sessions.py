"""Which conversation a request belongs to. Its requests go to the same replica, which holds their prefix."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

HEADER = "x-session-id"
"""The header by which a client names its conversation."""
FIELDS = ("prompt_cache_key", "user")
"""Fields of a body that name the conversation; the first one counts."""
BEGINNING = 256
"""Characters, or token ids, of a prompt that name its conversation. A shorter prompt names none, because it may grow."""


def session(headers: Iterable[tuple[bytes, bytes]], body: bytes) -> str:
    """A name of the conversation, 32 characters, the same for every request of it; "" for a request that shows none.

    The header counts before the fields, and these before the text. Of a chat, the messages up to the first one of the user name
    the conversation: later requests repeat them. headers: names in lower case, and values. body: as it was sent.
    """
    for name, value in headers:
        if name == HEADER.encode() and value:
            return _digest(["header", value.decode("latin-1")])
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(found, dict):
        return ""
    for field in FIELDS:
        if isinstance(found.get(field), str) and found[field]:
            return _digest([field, found[field]])
    beginning = _beginning(found)
    return "" if beginning is None else _digest(["text", beginning])


def _beginning(body: dict[str, Any]) -> Any:
    """What the conversation begins with; None for a request that has nothing of the kind."""
    if isinstance(turns := body.get("messages"), list):
        return _until_user(turns)
    if "input" in body:
        turns = body["input"]
        first = _until_user(turns) if isinstance(turns, list) else turns
        return None if first is None else [body.get("instructions"), first]
    prompt = body.get("prompt")
    if isinstance(prompt, str | list) and len(prompt) >= BEGINNING:
        return prompt[:BEGINNING]
    return None


def _until_user(turns: list[Any]) -> list[Any] | None:
    """The turns up to the first one of the user: role and content of each."""
    first = []
    for turn in turns:
        if not isinstance(turn, dict):
            return None
        first.append([turn.get("role"), turn.get("content")])
        if turn.get("role") == "user":
            return first
    return None


def _digest(named: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(named).encode(), digest_size=16).hexdigest()
