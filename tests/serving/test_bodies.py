"""What a body may hold: nulls of OpenAI's clients, valid Unicode, a Content-Type; and the code of a prompt that is too long."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import skipstone
from tests.helpers.served import InThread, in_thread, refusal, with_template

openai = pytest.importorskip("openai")
from openai.types import completion_create_params as texts  # noqa: E402
from openai.types import responses  # noqa: E402
from openai.types.chat import ChatCompletionMessageParam  # noqa: E402
from openai.types.chat import completion_create_params as chats  # noqa: E402

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f(", "max_tokens": 2, "temperature": 0, "seed": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "f"}], "max_tokens": 2, "temperature": 0, "seed": 3},
    "/v1/responses": {"input": "f", "max_output_tokens": 2, "temperature": 0},
}
PARAMS = {
    "/v1/completions": (texts.CompletionCreateParamsNonStreaming, texts.CompletionCreateParamsStreaming),
    "/v1/chat/completions": (chats.CompletionCreateParamsNonStreaming, chats.CompletionCreateParamsStreaming),
    "/v1/responses": (responses.response_create_params.ResponseCreateParamsNonStreaming,),
}
LONE = '"\\ud83d"'
"""An unpaired surrogate, as JSON writes it."""


def nullable(kind: Any) -> list[str]:
    """The fields of a TypedDict of openai-python that may be null."""
    return sorted(name for name, hint in typing.get_type_hints(kind).items() if type(None) in typing.get_args(hint))


NULLS = [(url, name) for url, kinds in PARAMS.items() for name in sorted({one for kind in kinds for one in nullable(kind)})]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    loaded = skipstone.load(with_template(tmp_path_factory.mktemp("nano")))
    with in_thread(lambda: loaded, max_num_seqs=4, max_model_len=256, method="autoregressive") as running:
        yield running


def without_ids(value: Any) -> Any:
    """An answer without what belongs to one request."""
    if isinstance(value, list):
        return [without_ids(one) for one in value]
    if not isinstance(value, dict):
        return value
    moment = ("id", "created", "created_at", "input_tokens_details", "prompt_tokens_details")
    return {name: without_ids(inner) for name, inner in value.items() if name not in moment}


def test_the_fields_that_may_be_null_are_found() -> None:
    assert len(NULLS) > 50
    assert ("/v1/chat/completions", "stop") in NULLS


@pytest.mark.parametrize(("url", "name"), NULLS)
def test_null_is_the_same_as_leaving_a_field_out(served: InThread, url: str, name: str) -> None:
    absent = {key: value for key, value in BODIES[url].items() if key != name}
    expected, found = (served.http.post(url, json=body) for body in (absent, {**absent, name: None}))
    is_needed = (url, name) == ("/v1/completions", "prompt")
    assert found.status_code == expected.status_code == (400 if is_needed else 200)
    if name not in ("max_tokens", "temperature", "seed"):  # each request may have other tokens without these
        assert without_ids(found.json()) == without_ids(expected.json())


@pytest.mark.parametrize("name", sorted(set(nullable(chats.CompletionCreateParamsStreaming)) - {"stream"}))
def test_null_is_absent_in_streams(served: InThread, name: str) -> None:
    body = {**BODIES["/v1/chat/completions"], name: None, "stream": True}
    response = served.http.post("/v1/chat/completions", json=body)
    assert response.status_code == 200
    assert response.text.rstrip().endswith("[DONE]")


MESSAGES = [(kind, name) for kind in typing.get_args(ChatCompletionMessageParam) for name in nullable(kind)]


@pytest.mark.parametrize(("kind", "name"), [one for one in MESSAGES if "Function" not in one[0].__name__])
def test_null_is_absent_in_messages(served: InThread, kind: Any, name: str) -> None:
    (role,) = typing.get_args(typing.get_type_hints(kind)["role"])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    message = {"role": role, "content": "x", "tool_calls": [call], name: None}
    body = {**BODIES["/v1/chat/completions"], "messages": [message, *BODIES["/v1/chat/completions"]["messages"]]}
    assert served.http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_message_of_openai_s_client_can_be_sent_back(served: InThread) -> None:
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    turns: list[Any] = [{"role": "user", "content": "f"}]
    for _ in range(2):
        answer = client.chat.completions.create(model="skipstone-nano", messages=turns, max_tokens=3)
        turns += [answer.choices[0].message.model_dump(), {"role": "user", "content": "g"}]
    turns[1]["annotations"] = []  # as OpenAI's own server has it
    client.chat.completions.create(model="skipstone-nano", messages=turns, max_tokens=3)


class City(BaseModel):
    """The arguments of a tool."""

    name: Literal["Paris"]


def test_a_parsed_message_of_openai_s_client_can_be_sent_back(served: InThread) -> None:
    """What its helpers have read of a message stands in the message, and so does the index of a streamed call."""
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none")
    user: Any = {"role": "user", "content": "f"}
    asked: dict[str, Any] = {"model": "skipstone-nano", "messages": [user], "temperature": 0}
    call: dict[str, Any] = {**asked, "tools": [openai.pydantic_function_tool(City)], "tool_choice": "required"}
    document = client.chat.completions.parse(**asked, response_format=City)
    with client.chat.completions.stream(**call) as stream:
        streamed = stream.get_final_completion()
    for answer in (document, client.chat.completions.parse(**call), streamed):
        found = json.loads(answer.choices[0].message.to_json(exclude_none=False))
        assert found.get("parsed") or found["tool_calls"][0]["function"]["parsed_arguments"]
        client.chat.completions.create(**{**asked, "messages": [user, found, user]}, max_tokens=2)


TOOL = '{"type": "function", "function": {"name": "f", "parameters": %s}}'
SURROGATES = {
    "prompt": ("/v1/completions", '{"prompt": %s}'),
    "stop": ("/v1/completions", '{"prompt": "x", "stop": [%s]}'),
    "user": ("/v1/completions", '{"prompt": "x", "user": %s}'),
    "an unknown field": ("/v1/completions", '{"prompt": "x", %s: 1}'),
    "a key of a bias": ("/v1/completions", '{"prompt": "x", "logit_bias": {%s: 1}}'),
    "a method": ("/v1/completions", '{"prompt": "x", "speculative": %s}'),
    "a setting": ("/v1/completions", '{"prompt": "x", "speculative": {"method": "auto", %s: 1}}'),
    "a message": ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}'),
    "a part": ("/v1/chat/completions", '{"messages": [{"role": "user", "content": [{"type": "text", "text": %s}]}]}'),
    "a model": ("/v1/chat/completions", '{"model": %s, "messages": [{"role": "user", "content": "x"}]}'),
    "a schema": (
        "/v1/chat/completions",
        '{"messages": [{"role": "user", "content": "x"}], "tool_choice": "required", "tools": ['
        + TOOL % '{"type": "object", "properties": {%s: {"type": "integer"}}}'
        + "]}",
    ),
    "a description": (
        "/v1/chat/completions",
        '{"messages": [{"role": "user", "content": "x"}], "tools": [' + TOOL % '{"description": %s}' + "]}",
    ),
    "a response format": (
        "/v1/completions",
        '{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"enum": [%s]}}}}',
    ),
    "input": ("/v1/responses", '{"input": %s}'),
    "metadata": ("/v1/responses", '{"input": "x", "metadata": {"a": %s}}'),
    "tokenize": ("/tokenize", '{"prompt": %s}'),
}


@pytest.mark.parametrize("name", SURROGATES)
def test_an_unpaired_surrogate_is_a_mistake_of_the_client_s(served: InThread, name: str) -> None:
    url, body = SURROGATES[name]
    response = served.http.post(url, content=(body % LONE).encode(), headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "surrogate" in refusal(response)


def test_nor_does_it_hide_in_the_arguments_of_a_call(served: InThread) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {LONE}}}'}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "x"}]
    response = served.http.post("/v1/chat/completions", json={"messages": turns})
    assert response.status_code == 400
    assert "surrogate" in refusal(response)


def test_a_pair_of_surrogates_is_a_character(served: InThread) -> None:
    body = b'{"prompt": "\\ud83d\\ude42", "max_tokens": 1, "echo": true}'
    response = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.json()["choices"][0]["text"].startswith("🙂")


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_missing_content_type_is_named(served: InThread, content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    response = served.http.post("/v1/completions", content=json.dumps({"prompt": "x"}).encode(), headers=headers)
    assert response.status_code == 400
    assert "Content-Type" in refusal(response)
    assert "application/json" in refusal(response)


@pytest.mark.parametrize(
    ("url", "body"),
    [
        ("/v1/completions", {"prompt": "x = 1\n" * 400}),
        ("/v1/completions", {"prompt": "x" * 40_000}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x = 1\n" * 400}]}),
        ("/v1/responses", {"input": "x = 1\n" * 400}),
    ],
)
def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(served: InThread, url: str, body: Any) -> None:
    response = served.http.post(url, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "256" in refusal(response)


UNREADABLE = {"nothing": (b"", "no body"), "no UTF-8": (b'{"prompt": "\xff"}', "UTF-8"), "deep": (b"[" * 100_000, "deep")}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_body_that_cannot_be_read_is_told_why(served: InThread, name: str) -> None:
    sent, cause = UNREADABLE[name]
    found = served.http.post("/v1/completions", content=sent, headers={"Content-Type": "application/json"})
    assert found.status_code == 400
    assert cause in found.json()["error"]["message"]
