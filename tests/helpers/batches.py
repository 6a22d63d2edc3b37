"""Files of requests in the shape of OpenAI's batch API, and what comes of them."""

import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import skipstone
from skipstone.assets import BUNDLED
from skipstone.serving.batch_files.batch import BatchSettings
from skipstone.serving.batch_files.journal import journal_of
from skipstone.serving.settings import ServerSettings

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


@lru_cache
def _load(model: Path | None) -> Any:
    return skipstone.load(model, keep_weights=False)


def batch_settings(
    model: Path | None = None, method: Any = None, *, max_num_seqs: int = 3, name: str = BUNDLED
) -> BatchSettings:
    """Settings of a batch. Their `load` loads a model once in a process."""
    server = ServerSettings(name, method, max_num_seqs, max_waiting=1 << 30, drain_seconds=0.0)
    return BatchSettings(partial(_load, model), server, {"model": name})


def journal_answers(output: Path) -> dict[int, dict[str, Any]]:
    """The answers in an output's journal, which nobody writes, by the numbers of their requests."""
    with closing(sqlite3.connect(journal_of(output))) as database:
        return {number: json.loads(line) for number, line in database.execute("SELECT number, line FROM answers")}
