"""Files of requests in the shape of OpenAI's batch API, and what comes of them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
WORDS = ("add", "read", "parse", "merge", "sort", "load", "find", "split", "count", "write", "scale")


def request(name: str, body: Any, url: str = COMPLETIONS, method: str = "POST") -> dict[str, Any]:
    return {"custom_id": name, "method": method, "url": url, "body": body}


def greedy(prompt: Any, tokens: int = 12, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, **more}


def many(count: int, tokens: int = 12) -> list[dict[str, Any]]:
    """Requests of different lengths, every third one sampled, half of these without a seed."""
    found = []
    for place in range(count):
        body = greedy(f"def {WORDS[place % 11]}_{place}(a, b):", 2 + place * 7 % tokens)
        if place % 3 == 0:
            body |= {"temperature": 0.8} | ({"seed": place} if place % 2 else {})
        found.append(request(f"request-{place}", body))
    return found


def write(path: Path, requests: Sequence[Any]) -> Path:
    """A file of lines; a text is a line as it stands."""
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in requests))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def texts(path: Path) -> dict[str, str]:
    return {one["custom_id"]: one["response"]["body"]["choices"][0]["text"] for one in read(path)}
