"""Chats, tools, /v1/responses and predictions, over a real socket, with OpenAI's client and the bundled model, which is given a
chat template."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
import torch
from pydantic import ValidationError

import skipstone
from skipstone.serving.schemas import ChatBody
from tests.helpers.hostile import nested
from tests.helpers.served import InThread, in_thread, refusal

TEMPLATE = (
    "{% for tool in tools or [] %}# {{ tool.function.name }}\n{% endfor %}"
    "{% for message in messages %}# {{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }}){% endfor %}\n"
    "{% endfor %}{% if add_generation_prompt %}def{% endif %}"
)
ASKED = [{"role": "user", "content": "add two numbers"}]
NUMBER = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
TOOLS: Any = [
    {"type": "function", "function": {"name": "double", "description": "of a number", "parameters": NUMBER}},
    {"type": "function", "function": {"name": "now"}},
]


@pytest.fixture(scope="module")
def chatty(loaded: Any) -> Any:
    """The bundled model's tokenizer with a template."""
    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="module")
def server(loaded: Any, chatty: Any) -> Iterator[InThread]:
    with in_thread(lambda: (loaded[0], chatty), max_num_seqs=2, max_waiting=8, drain_seconds=5) as running:
        yield running


@pytest.fixture(scope="module")
def plain(loaded: Any) -> Iterator[InThread]:
    """The same without a template."""
    with in_thread(lambda: loaded, max_num_seqs=2, max_waiting=8, drain_seconds=5) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: InThread) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def expected(loaded: Any, chatty: Any, turns: list[dict[str, Any]], new: int) -> str:
    """What `skipstone.generate` answers to a chat."""
    return skipstone.generate(loaded[0], turns, tokenizer=chatty, max_new_tokens=new, do_sample=False).text


# ------------------------------------------------------------------------------------------------------------- chats


def test_a_chat_is_answered_as_generate_answers_it(loaded: Any, chatty: Any, client: openai.OpenAI) -> None:
    turns: Any = [{"role": "system", "content": "be brief"}, *ASKED, {"role": "assistant", "content": "a + b"}, *ASKED]
    wanted = expected(loaded, chatty, turns, 30)
    asked: dict[str, Any] = {"model": "skipstone-nano", "messages": turns, "max_completion_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].message.content == wanted
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "length"


def test_log_probabilities_of_a_chat(server: InThread) -> None:
    body = {"messages": ASKED, "max_tokens": 5, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    content = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]["logprobs"]["content"]
    assert len(content) == 5
    for one in content:
        assert one["top_logprobs"][0]["token"] == one["token"], "greedily the likeliest is taken"
        assert one["top_logprobs"][0]["logprob"] == one["logprob"] < 0
        assert bytes(one["bytes"]).decode() == one["token"]


# ------------------------------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("choice", "speculative"),
    [
        ("required", "off"),
        ({"type": "function", "function": {"name": "double"}}, "auto"),
        ("required", "layerskip exit_layer=6"),
    ],
)
def test_a_demanded_call_is_made_whatever_drafts(client: openai.OpenAI, choice: Any, speculative: str) -> None:
    asked: dict[str, Any] = {"model": "skipstone-nano", "messages": ASKED, "tools": TOOLS, "tool_choice": choice}
    asked |= {"max_tokens": 60, "seed": 3, "extra_body": {"speculative": speculative}}
    if choice == "required":
        asked["tools"] = TOOLS[:1]
    whole = client.chat.completions.create(**asked)
    assert whole.choices[0].finish_reason == "tool_calls"
    message = whole.choices[0].message
    assert message.content is None
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "double"
    assert json.loads(call.function.arguments) in ({"n": 1}, {"n": 2})
    chunks = list(client.chat.completions.create(**asked, stream=True))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    (streamed,) = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    assert streamed.function is not None
    assert (streamed.index, streamed.function.name) == (0, "double")


def test_tools_that_may_be_called_leave_a_text_as_it_is(loaded: Any, chatty: Any, client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "skipstone-nano", "messages": ASKED, "max_tokens": 20, "temperature": 0}
    offered = client.chat.completions.create(**asked, tools=TOOLS)
    ids = chatty.apply_chat_template(ASKED, tools=TOOLS, add_generation_prompt=True, return_dict=True)["input_ids"]
    output = skipstone.generate(loaded[0], torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    assert output.new_tokens is not None
    assert offered.choices[0].message.content == chatty.decode(output.new_tokens[0])
    assert offered.choices[0].message.tool_calls is None
    assert offered.usage is not None
    none = client.chat.completions.create(**asked, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == expected(loaded, chatty, ASKED, 20)


def test_the_answer_of_a_tool_goes_back_into_the_chat(server: InThread) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "double", "arguments": '{"n": 2}'}}
    turns = [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "call_1", "content": "4"}]
    turns.insert(0, {"role": "developer", "content": "be brief"})
    found = server.http.post("/tokenize", json={"messages": turns}).json()["tokens"]
    text = server.http.post("/detokenize", json={"tokens": found}).json()["prompt"]
    assert "# system: be brief" in text, "the role of templates"
    assert text.endswith('# assistant: double({"n": 2})# tool: 4def')
    assert server.http.post("/v1/chat/completions", json={"messages": turns, "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "gone"}}}, "there is no tool 'gone'"),
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}}, "exclude each other"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "strict": True}}]}, "strict is kept"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "b" * 300_000}}]}, "too many characters"),
        ({"messages": [{"role": "user"}]}, "a message has content"),
        ({"messages": [{"role": "user", "tool_calls": [], "content": None}]}, "a message has content"),
    ],
)
def test_tools_that_cannot_be(server: InThread, body: dict[str, Any], said: str) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 3, **body})
    assert response.status_code == 400
    assert said in refusal(response)


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("depth", [60, 900])
def test_tools_nested_deeply_are_answered_and_never_with_500(server: InThread, choice: str, depth: int) -> None:
    function = {"name": "deep", "parameters": nested(depth, "properties")}
    tools = [{"type": "function", "function": function}]
    body = {"messages": ASKED, "max_tokens": 2, "tools": tools, "tool_choice": choice}
    answer = server.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == (200 if (choice, depth) == ("auto", 60) else 400), answer.text


def test_arguments_nested_deeply_are_refused(server: InThread) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "deep", "arguments": json.dumps(nested(900))}}
    turns = [*ASKED, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "1", "content": "4"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        answer = server.http.post(path, json={"messages": turns})
        assert answer.status_code == 400
        assert "at most 100 deep" in refusal(answer)


def test_arguments_that_are_no_json() -> None:
    for arguments in ("n=2", "[" * 5000, "3", '{"n": NaN}', '{"n": 1e999}', '{"n": -Infinity}'):
        call = {"id": "1", "type": "function", "function": {"name": "double", "arguments": arguments}}
        body = ChatBody.model_validate({"messages": [{"role": "assistant", "tool_calls": [call]}]})
        with pytest.raises(ValueError, match="arguments of double must be a JSON object"):
            body.messages[0].turn()
    with pytest.raises(ValidationError, match="only an assistant"):
        ChatBody.model_validate({"messages": [{"role": "user", "tool_calls": [call]}]})


# --------------------------------------------------------------------------------------------------------- /v1/responses


def test_a_response_is_the_answer_of_the_chat(loaded: Any, chatty: Any, client: openai.OpenAI) -> None:
    wanted = expected(loaded, chatty, [{"role": "system", "content": "be brief"}, *ASKED], 25)
    asked: dict[str, Any] = {"model": "skipstone-nano", "input": "add two numbers", "instructions": "be brief"}
    asked |= {"max_output_tokens": 25, "temperature": 0}
    whole = client.responses.create(**asked)
    assert whole.output_text == wanted
    assert whole.status == "incomplete"
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 25
    again = client.responses.create(**{**asked, "input": [{"role": "user", "content": "add two numbers"}]})
    assert again.output_text == wanted


def test_a_response_is_streamed_event_by_event(loaded: Any, chatty: Any, client: openai.OpenAI) -> None:
    wanted = expected(loaded, chatty, ASKED, 25)
    asked: dict[str, Any] = {"model": "skipstone-nano", "input": "add two numbers", "max_output_tokens": 25, "temperature": 0}
    events = list(client.responses.create(**asked, stream=True))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    kinds = [one.type for one in events if one.type != "response.output_text.delta"]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == wanted
    last: Any = events[-1]
    assert last.response.output_text == wanted


def test_a_conversation_goes_on_with_what_an_earlier_response_had(client: openai.OpenAI) -> None:
    first = client.responses.create(model="skipstone-nano", input="add two numbers", max_output_tokens=5, temperature=0)
    turns: Any = [{"role": "user", "content": "add two numbers"}, *[one.model_dump() for one in first.output], *ASKED]
    assert client.responses.create(model="skipstone-nano", input=turns, max_output_tokens=5).output_text


def test_a_response_of_a_schema(client: openai.OpenAI) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "number", "schema": NUMBER, "strict": True}}
    found = client.responses.create(model="skipstone-nano", input="a number", text=wanted, max_output_tokens=40)
    assert json.loads(found.output_text) in ({"n": 1}, {"n": 2})
    assert found.status == "completed"


def test_without_chats_a_response_goes_on_with_its_input(loaded: Any, plain: InThread) -> None:
    body: dict[str, Any] = {"input": "def add(a, b):", "max_output_tokens": 20, "temperature": 0, "return_metrics": True}
    found = plain.http.post("/v1/responses", json=body).json()
    model, tokenizer = loaded
    wanted = skipstone.generate(model, "def add(a, b):", tokenizer=tokenizer, max_new_tokens=20, do_sample=False).text
    assert found["output"][0]["content"][0]["text"] == wanted
    assert found["metrics"]["speculative_decoding"]["num_draft_tokens"] >= 0
    said = refusal(plain.http.post("/v1/responses", json=body | {"instructions": "be brief"}))
    assert "no chat template" in said


@pytest.mark.parametrize("field", [{"previous_response_id": "resp_1"}, {"tools": []}, {"background": True}])
def test_what_responses_do_not_have_is_refused(server: InThread, field: dict[str, Any]) -> None:
    (name,) = field
    assert f"{name}: this field is not supported" == refusal(server.http.post("/v1/responses", json={"input": "a", **field}))


# ------------------------------------------------------------------------------------------------------------ predictions


@pytest.mark.parametrize("speculative", ["auto", "prompt_lookup"])
def test_a_prediction_is_drafted_and_changes_nothing(plain: InThread, speculative: str) -> None:
    prompt = "class Stack:\n    def __init__(self):\n"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 80, "temperature": 0, "speculative": speculative}
    without = plain.http.post("/v1/completions", json=body).json()
    assert "completion_tokens_details" not in without["usage"]
    text = without["choices"][0]["text"]
    edited = text[:90] + " # another end" + text[100:]
    for content, least in ((text, 0.7), (edited, 0.3), ([{"type": "text", "text": "nothing like it at all"}], 0.0)):
        found = plain.http.post("/v1/completions", json={**body, "prediction": {"type": "content", "content": content}}).json()
        assert found["choices"][0]["text"] == text
        told, written = found["usage"]["completion_tokens_details"], found["usage"]["completion_tokens"]
        least = least if speculative == "prompt_lookup" else 0.0  # `auto` goes by the clock
        assert least * written <= told["accepted_prediction_tokens"] <= written
        assert told["rejected_prediction_tokens"] >= 0
    assert told["accepted_prediction_tokens"] < 5


def test_a_prediction_needs_a_method_that_looks_up(plain: InThread) -> None:
    body = {"prompt": "a", "max_tokens": 3, "prediction": {"type": "content", "content": "b"}}
    for method, stream in (("off", False), ("off", True), ("auto candidates=recycle", True)):
        response = plain.http.post("/v1/completions", json=body | {"stream": stream, "speculative": method})
        assert response.status_code == 400
        assert "auto or prompt_lookup" in refusal(response)


def test_tools_whose_arguments_refer_to_themselves(server: InThread, chatty: Any) -> None:
    """A reference is one within the parameters; arguments without an end are refused before a token is written."""
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
    deeper = {str(chatty.convert_tokens_to_ids(token)): 100 for token in '{"'}

    def asked(parameters: dict[str, Any]) -> httpx.Response:
        tools = [{"type": "function", "function": {"name": "grow", "parameters": parameters}}]
        body = {"messages": ASKED, "tools": tools, "tool_choice": "required", "max_tokens": 40, "temperature": 0}
        return server.http.post("/v1/chat/completions", json={**body, "logit_bias": deeper})

    choice = asked(tree).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('{"name": "grow", "arguments": {"left": {"left": {')
    value = {"$ref": "#/a"}  # no reference where it is a value
    constant = asked(
        {"type": "object", "properties": {"b": {"const": value}}, "required": ["b"], "additionalProperties": False}
    )
    (call,) = constant.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"b": value}
    endless = asked(tree | {"required": ["left"]})
    assert endless.status_code == 400
    assert "without end" in refusal(endless)
    bad = asked({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}})
    assert bad.status_code == 400
    assert "(?=x)" in refusal(bad)


def test_json_that_is_no_call_is_streamed_while_it_is_written(server: InThread) -> None:
    format_ = {
        "type": "json_schema",
        "json_schema": {"schema": {"type": "object", "properties": {"answer": {"type": "string"}}}},
    }
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 30, "temperature": 0, "stream": True, "response_format": format_}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    pieces = [one for line in lines if (one := json.loads(line)["choices"][0]["delta"].get("content"))]
    assert len(pieces) > 1
    assert pieces[0].startswith("{")
