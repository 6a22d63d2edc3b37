"""The name of a conversation: the same for all its requests, another one for others, none where a request shows none."""

from __future__ import annotations

import json
from typing import Any

import pytest

from skipstone.serving.ray.session_affinity import HEADER, PREFIX_LENGTH, session_id


def of(body: Any, **headers: str) -> str:
    sent = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return session_id(sent, json.dumps(body).encode())


SYSTEM = {"role": "system", "content": "Answer in one sentence."}
FIRST = {"role": "user", "content": "What is a skipstone?"}
LATER = [{"role": "assistant", "content": "A stone."}, {"role": "user", "content": "Why?"}]


def test_the_turns_of_a_chat_have_one_name_and_other_chats_have_others() -> None:
    chat = of({"messages": [SYSTEM, FIRST], "temperature": 0})
    assert len(chat) == 32
    assert chat == of({"messages": [SYSTEM, FIRST, *LATER], "max_tokens": 9})
    assert chat != of({"messages": [SYSTEM, {**FIRST, "content": "What is a stone?"}]})
    assert chat != of({"messages": [FIRST]})
    with_parts = {"role": "user", "content": [{"type": "text", "text": "What?"}]}
    assert of({"messages": [with_parts]}) == of({"messages": [with_parts, *LATER]}) != ""


def test_the_turns_of_a_response_have_one_name() -> None:
    asked = of({"instructions": "Be short.", "input": [FIRST]})
    assert asked == of({"instructions": "Be short.", "input": [FIRST, *LATER]}) != ""
    assert asked != of({"instructions": "Be long.", "input": [FIRST]})
    assert of({"input": "What?"}) != ""


@pytest.mark.parametrize("prompt", ["def add(a, b):\n" * 40, list(range(400))])
def test_a_bare_prompt_is_named_by_a_beginning_that_later_ones_repeat(prompt: Any) -> None:
    long, longer = prompt[: PREFIX_LENGTH + 1], prompt[: PREFIX_LENGTH + 40]
    assert of({"prompt": long}) == of({"prompt": longer}) != ""
    assert of({"prompt": prompt[: PREFIX_LENGTH - 1]}) == "", "the next prompt may be longer, and would have another name"
    changed = prompt[:5] + prompt[6:]
    assert of({"prompt": changed}) != of({"prompt": long})


def test_what_the_client_says_counts_before_the_text_and_the_header_before_all() -> None:
    one, other = {"messages": [FIRST]}, {"messages": [SYSTEM, FIRST]}
    assert of(one, x_session_id="a") == of(other, x_session_id="a") != of(one, x_session_id="b")
    assert of({**one, "prompt_cache_key": "a"}) == of({**other, "prompt_cache_key": "a", "user": "b"}) != of(one)
    assert of({**one, "user": "a"}) == of({**other, "user": "a"})
    assert of({**one, "user": "a"}, x_session_id="a") == of(other, x_session_id="a")
    assert HEADER == "x-session-id"


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff",
        b"[1]",
        b"3",
        b"[" * 100_000,
        b'{"messages": 3}',
        b'{"messages": [3]}',
        b'{"input": []}',
        b'{"prompt": {}}',
    ],
)
def test_a_request_that_shows_no_conversation_has_no_name(body: bytes) -> None:
    assert session_id([], body) == ""


def test_an_empty_name_is_none() -> None:
    assert of({"prompt": "a", "prompt_cache_key": "", "user": ""}, x_session_id="") == ""
