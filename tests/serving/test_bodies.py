"""What a body may hold: nulls of OpenAI's clients, valid Unicode, a Content-Type; and the code of a prompt that is too long."""

import json
import re
import typing
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import skipstone
from tests.helpers.served import InThread, in_thread, refusal, with_template, without_run

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "def f(", "max_tokens": 2, "temperature": 0, "seed": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "f"}], "max_tokens": 2, "temperature": 0, "seed": 3},
    "/v1/responses": {"input": "f", "max_output_tokens": 2, "temperature": 0},
}
LONE = '"\\ud83d"'


def nullable(kind: Any) -> list[str]:
    return sorted(name for name, hint in typing.get_type_hints(kind).items() if type(None) in typing.get_args(hint))


@pytest.fixture(scope="module")
def params() -> dict[str, tuple[Any, ...]]:
    """The client's types of every route's body."""
    from openai.types import completion_create_params as texts  # in two seconds, which no other test shall take
    from openai.types import responses
    from openai.types.chat import completion_create_params as chats

    return {
        "/v1/completions": (texts.CompletionCreateParamsNonStreaming, texts.CompletionCreateParamsStreaming),
        "/v1/chat/completions": (chats.CompletionCreateParamsNonStreaming, chats.CompletionCreateParamsStreaming),
        "/v1/responses": (responses.response_create_params.ResponseCreateParamsNonStreaming,),
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InThread]:
    loaded = skipstone.load(with_template(tmp_path_factory.mktemp("nano")))
    with in_thread(lambda: loaded, max_num_seqs=4, max_model_len=128, method="autoregressive") as running:
        yield running


@pytest.mark.parametrize("url", BODIES)
def test_null_is_the_same_as_leaving_a_field_out(served: InThread, params: Any, url: str) -> None:
    names = sorted({one for kind in params[url] for one in nullable(kind)})
    assert "temperature" in names
    same = without_run(served.http.post(url, json=BODIES[url]).json())
    for name in names:
        response = served.http.post(url, json={**BODIES[url], name: None})
        if (url, name) == ("/v1/completions", "prompt"):
            assert response.status_code == 400
        elif name in BODIES[url]:  # the text may have other tokens without these
            assert response.status_code == 200
        else:
            assert without_run(response.json()) == same, name


def test_null_is_absent_in_streams(served: InThread, params: Any) -> None:
    body = dict.fromkeys(nullable(params["/v1/chat/completions"][1])) | BODIES["/v1/chat/completions"]
    response = served.http.post("/v1/chat/completions", json=body | {"stream": True})
    assert response.status_code == 200
    assert response.text.rstrip().endswith("[DONE]")


def test_null_is_absent_in_messages(served: InThread) -> None:
    from openai.types.chat import ChatCompletionMessageParam

    kinds = [one for one in typing.get_args(ChatCompletionMessageParam) if nullable(one) and "Function" not in one.__name__]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    for kind in kinds:
        (role,) = typing.get_args(typing.get_type_hints(kind)["role"])
        for name in nullable(kind):
            message = {"role": role, "content": "x", "tool_calls": [call], name: None}
            body = {**BODIES["/v1/chat/completions"], "messages": [message, {"role": "user", "content": "f"}]}
            assert served.http.post("/v1/chat/completions", json=body).status_code == 200, (role, name)


def test_a_message_of_openai_s_client_can_be_sent_back(served: InThread) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{served.url}/v1", api_key="none")
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
    from openai import OpenAI, pydantic_function_tool

    """What its helpers have read of a message stands in the message, and so does the index of a streamed call."""
    client = OpenAI(base_url=f"{served.url}/v1", api_key="none")
    user: Any = {"role": "user", "content": "f"}
    request: dict[str, Any] = {"model": "skipstone-nano", "messages": [user], "temperature": 0}
    call: dict[str, Any] = {**request, "tools": [pydantic_function_tool(City)], "tool_choice": "required"}
    document = client.chat.completions.parse(**request, response_format=City)
    with client.chat.completions.stream(**call) as stream:
        streamed = stream.get_final_completion()
    for answer in (document, client.chat.completions.parse(**call), streamed):
        result = json.loads(answer.choices[0].message.to_json(exclude_none=False))
        assert result.get("parsed") or result["tool_calls"][0]["function"]["parsed_arguments"]
        client.chat.completions.create(**{**request, "messages": [user, result, user]}, max_tokens=2)


TOOL = '{"type": "function", "function": {"name": "f", "parameters": %s}}'
SURROGATES = {
    "prompt": ("/v1/completions", '{"prompt": %s}'),
    "an unknown field": ("/v1/completions", '{"prompt": "x", %s: 1}'),
    "a key of a bias": ("/v1/completions", '{"prompt": "x", "logit_bias": {%s: 1}}'),
    "a setting": ("/v1/completions", '{"prompt": "x", "speculative": {"method": "auto", %s: 1}}'),
    "a message": ("/v1/chat/completions", '{"messages": [{"role": "user", "content": %s}]}'),
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
    "metadata": ("/v1/responses", '{"input": "x", "metadata": {"a": %s}}'),
    "tokenize": ("/tokenize", '{"prompt": %s}'),
}


@pytest.mark.parametrize("name", [*SURROGATES, "the arguments of a call"])
def test_an_unpaired_surrogate_is_a_mistake_of_the_client_s(served: InThread, name: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": f'{{"a": {LONE}}}'}}
    turns = [{"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "user", "content": "x"}]
    url, body = SURROGATES.get(name, ("/v1/chat/completions", json.dumps({"messages": turns})))
    content = (body % LONE if name in SURROGATES else body).encode()
    response = served.http.post(url, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert "surrogate" in refusal(response)


def test_a_pair_of_surrogates_is_a_character(served: InThread) -> None:
    body = b'{"prompt": "\\ud83d\\ude42", "max_tokens": 1, "echo": true}'
    response = served.http.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.json()["choices"][0]["text"].startswith("🙂")


def test_a_missing_content_type_is_named(served: InThread) -> None:
    for headers in ({}, {"Content-Type": "text/plain"}, {"Content-Type": "application/x-www-form-urlencoded"}):
        response = served.http.post("/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        assert response.status_code == 400
        assert re.search(r"Content-Type.*application/json", refusal(response))


def test_a_prompt_that_is_too_long_has_the_code_that_clients_look_for(served: InThread) -> None:
    long = "x = 1\n" * 400
    for url, body in (
        ("/v1/completions", {"prompt": long}),
        ("/v1/completions", {"prompt": "x" * 40_000}),
        ("/v1/completions", {"prompt": "x", "max_tokens": 100_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]}),
        ("/v1/responses", {"input": long}),
    ):
        response = served.http.post(url, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert "128" in refusal(response)


def test_a_body_that_cannot_be_read_is_told_why(served: InThread) -> None:
    for content, cause in ((b"", "no body"), (b'{"prompt": "\xff"}', "UTF-8"), (b"[" * 100_000, "deep")):
        response = served.http.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert response.status_code == 400
        assert cause in refusal(response)
