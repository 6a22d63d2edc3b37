"""Chats, their templates, tools, /v1/responses and predictions, over a real socket, with the bundled model."""

import copy
import http.client
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import torch
from pydantic import ValidationError

import skipstone
from skipstone.serving.api_schemas import ChatBody
from skipstone.serving.request_parser import takes_arguments_as_text
from skipstone.serving.server import Server
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
    return with_template(loaded[1], TEMPLATE)


@pytest.fixture(scope="module")
def server(loaded: Any, chatty: Any) -> Iterator[InThread]:
    with in_thread(lambda: (loaded[0], chatty), max_num_seqs=2, max_waiting=8, drain_seconds=5) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: InThread) -> Any:
    from openai import OpenAI  # in two seconds, which no other test shall take

    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def expected(loaded: Any, chatty: Any, turns: list[dict[str, Any]], new: int) -> str:
    return skipstone.generate(loaded[0], turns, tokenizer=chatty, max_new_tokens=new, do_sample=False).text


def test_a_chat_is_answered_as_generate_answers_it(loaded: Any, chatty: Any, client: Any) -> None:
    turns: Any = [{"role": "system", "content": "be brief"}, *ASKED, {"role": "assistant", "content": "a + b"}, *ASKED]
    wanted = expected(loaded, chatty, turns, 30)
    request: dict[str, Any] = {"model": "skipstone-nano", "messages": turns, "max_completion_tokens": 30, "temperature": 0}
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].message.content == wanted
    assert whole.choices[0].message.role == "assistant"
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == wanted
    assert chunks[-1].choices[0].finish_reason == "length"


@pytest.mark.parametrize(
    ("choice", "speculative"),
    [({"type": "function", "function": {"name": "double"}}, "auto"), ("required", "layerskip exit_layer=6")],
)
def test_a_demanded_call_is_made_whatever_drafts(client: Any, choice: Any, speculative: str) -> None:
    request: dict[str, Any] = {"model": "skipstone-nano", "messages": ASKED, "tools": TOOLS, "tool_choice": choice}
    request |= {"max_tokens": 60, "seed": 3, "extra_body": {"speculative": speculative}}
    if choice == "required":
        request["tools"] = TOOLS[:1]
    whole = client.chat.completions.create(**request)
    assert whole.choices[0].finish_reason == "tool_calls"
    message = whole.choices[0].message
    assert message.content is None
    (call,) = message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "double"
    assert json.loads(call.function.arguments) in ({"n": 1}, {"n": 2})
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert not any(chunk.choices[0].delta.content for chunk in chunks)
    (streamed,) = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    assert streamed.function is not None
    assert (streamed.index, streamed.function.name) == (0, "double")


def test_tools_that_may_be_called_leave_a_text_as_it_is(loaded: Any, chatty: Any, client: Any) -> None:
    request: dict[str, Any] = {"model": "skipstone-nano", "messages": ASKED, "max_tokens": 20, "temperature": 0}
    offered = client.chat.completions.create(**request, tools=TOOLS)
    ids = chatty.apply_chat_template(ASKED, tools=TOOLS, add_generation_prompt=True, return_dict=True)["input_ids"]
    output = skipstone.generate(loaded[0], torch.tensor([ids]), max_new_tokens=20, do_sample=False)
    assert output.new_tokens is not None
    assert offered.choices[0].message.content == chatty.decode(output.new_tokens[0])
    assert offered.choices[0].message.tool_calls is None
    assert offered.usage is not None
    none = client.chat.completions.create(**request, tools=TOOLS, tool_choice="none")
    assert none.choices[0].message.content == expected(loaded, chatty, ASKED, 20)


def test_the_answer_of_a_tool_goes_back_into_the_chat(server: InThread) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "double", "arguments": '{"n": 2}'}}
    turns = [{"role": "developer", "content": "be brief"}, *ASKED, {"role": "assistant", "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "call_1", "content": "4"})
    result = server.http.post("/tokenize", json={"messages": turns}).json()["tokens"]
    text = server.http.post("/detokenize", json={"tokens": result}).json()["prompt"]
    assert "# system: be brief" in text, "the role of templates"
    assert text.endswith('# assistant: double({"n": 2})# tool: 4def')


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
        ({"chat_template": "{{ 'a' * 10 ** 9 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({"messages": [{"role": "user", "tool_calls": [], "content": None}]}, "a message has content"),
    ],
)
def test_tools_that_cannot_be(server: InThread, body: dict[str, Any], said: str) -> None:
    response = server.http.post("/v1/chat/completions", json={"messages": ASKED, "max_tokens": 3, **body})
    assert response.status_code == 400
    assert said in refusal(response)


def test_tools_and_arguments_nested_deeply_are_answered_and_never_with_500(server: InThread) -> None:
    for choice, depth in itertools.product(("auto", "required"), (60, 900)):
        function = {"name": "deep", "parameters": nested(depth, "properties")}
        tools = [{"type": "function", "function": function}]
        body = {"messages": ASKED, "max_tokens": 2, "tools": tools, "tool_choice": choice}
        answer = server.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == (200 if (choice, depth) == ("auto", 60) else 400), answer.text
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


def test_a_response_is_the_answer_of_the_chat_and_its_output_goes_on(loaded: Any, chatty: Any, client: Any) -> None:
    wanted = expected(loaded, chatty, [{"role": "system", "content": "be brief"}, *ASKED], 25)
    request: dict[str, Any] = {"model": "skipstone-nano", "instructions": "be brief", "max_output_tokens": 25, "temperature": 0}
    whole = client.responses.create(**request, input="add two numbers")
    assert (whole.output_text, whole.status) == (wanted, "incomplete")
    assert whole.incomplete_details is not None
    assert whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage is not None
    assert whole.usage.output_tokens == 25
    assert client.responses.create(**request, input=[*ASKED]).output_text == wanted
    turns: Any = [*ASKED, *[one.model_dump() for one in whole.output], *ASKED]
    assert client.responses.create(**request, input=turns).output_text


def test_a_response_is_streamed_event_by_event(loaded: Any, chatty: Any, client: Any) -> None:
    wanted = expected(loaded, chatty, ASKED, 25)
    request: dict[str, Any] = {"model": "skipstone-nano", "input": "add two numbers", "max_output_tokens": 25, "temperature": 0}
    events: list[Any] = list(client.responses.create(**request, stream=True))
    assert [one.sequence_number for one in events] == list(range(len(events)))
    kinds = [one.type.removeprefix("response.") for one in events if one.type != "response.output_text.delta"]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds == [*begin, "output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert "".join(one.delta for one in events if one.type == "response.output_text.delta") == wanted
    assert events[-1].response.output_text == wanted


def test_a_response_of_a_schema(client: Any) -> None:
    wanted: Any = {"format": {"type": "json_schema", "name": "number", "schema": NUMBER, "strict": True}}
    result = client.responses.create(model="skipstone-nano", input="a number", text=wanted, max_output_tokens=40)
    assert json.loads(result.output_text) in ({"n": 1}, {"n": 2})
    assert result.status == "completed"


def test_without_chats_a_response_goes_on_with_its_input(loaded: Any, nano: InThread) -> None:
    body: dict[str, Any] = {"input": "def add(a, b):", "max_output_tokens": 20, "temperature": 0, "return_metrics": True}
    result = nano.http.post("/v1/responses", json=body).json()
    model, tokenizer = loaded
    wanted = skipstone.generate(model, "def add(a, b):", tokenizer=tokenizer, max_new_tokens=20, do_sample=False).text
    assert result["output"][0]["content"][0]["text"] == wanted
    assert result["metrics"]["speculative_decoding"]["num_draft_tokens"] >= 0
    for field, said in (
        ({"instructions": "be brief"}, "no chat template"),
        ({"previous_response_id": "resp_1"}, "previous_response_id: this field is not supported"),
        ({"tools": []}, "tools: this field is not supported"),
        ({"background": True}, "background: this field is not supported"),
    ):
        assert said in refusal(nano.http.post("/v1/responses", json=body | field))


def test_a_prediction_is_drafted_and_changes_nothing(nano: InThread) -> None:
    prompt = "class Stack:\n    def __init__(self):\n"
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "speculative": "prompt_lookup"}
    without = nano.http.post("/v1/completions", json=body).json()
    assert "completion_tokens_details" not in without["usage"]
    text, accepted = without["choices"][0]["text"], []
    edited, other = text[:60] + " # another end" + text[70:], [{"type": "text", "text": "nothing like it at all"}]
    for content, speculative in ((text, "prompt_lookup"), (edited, "prompt_lookup"), (other, "prompt_lookup"), (text, "auto")):
        predicted = {**body, "speculative": speculative, "prediction": {"type": "content", "content": content}}
        result = nano.http.post("/v1/completions", json=predicted).json()
        assert result["choices"][0]["text"] == text
        info = result["usage"]["completion_tokens_details"]
        accepted.append(info["accepted_prediction_tokens"] / result["usage"]["completion_tokens"])
        assert info["rejected_prediction_tokens"] >= 0
    assert 1 >= accepted[0] >= 0.7
    assert accepted[0] > accepted[1] >= 0.3 > 0.1 > accepted[2]
    body |= {"prediction": {"type": "content", "content": "b"}}
    for method, stream in (("off", False), ("off", True), ("auto candidates=recycle", True)):
        response = nano.http.post("/v1/completions", json=body | {"stream": stream, "speculative": method})
        assert response.status_code == 400
        assert "auto or prompt_lookup" in refusal(response)


def test_tools_whose_arguments_refer_to_themselves(server: InThread, chatty: Any) -> None:
    """A reference is one within the parameters; arguments without an end are refused before a token is written."""
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
    deeper = {str(chatty.convert_tokens_to_ids(token)): 100 for token in '{"'}

    def request(parameters: dict[str, Any]) -> httpx.Response:
        tools = [{"type": "function", "function": {"name": "grow", "parameters": parameters}}]
        body = {"messages": ASKED, "tools": tools, "tool_choice": "required", "max_tokens": 40, "temperature": 0}
        return server.http.post("/v1/chat/completions", json={**body, "logit_bias": deeper})

    choice = request(tree).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].startswith('{"name": "grow", "arguments": {"left": {"left": {')
    value = {"$ref": "#/a"}  # no reference where it is a value
    constant = request(
        {"type": "object", "properties": {"b": {"const": value}}, "required": ["b"], "additionalProperties": False}
    )
    (call,) = constant.json()["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"b": value}
    endless = request(tree | {"required": ["left"]})
    assert endless.status_code == 400
    assert "without end" in refusal(endless)
    bad = request({"type": "object", "properties": {"a": {"type": "string", "pattern": "(?=x)"}}})
    assert bad.status_code == 400
    assert "(?=x)" in refusal(bad)


def test_json_that_is_no_call_is_streamed_while_it_is_written(server: InThread) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}}
    body = {"messages": ASKED, "tools": TOOLS, "max_tokens": 30, "temperature": 0, "stream": True}
    body |= {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    deltas = [chunk["choices"][0]["delta"] for chunk in server.chunks(body, "/v1/chat/completions")]
    pieces = [one["content"] for one in deltas if one.get("content")]
    assert len(pieces) > 1
    assert pieces[0].startswith("{")


CALLS = "{%% for call in message.tool_calls or [] %%}<call>%s</call>{%% endfor %%}"
TURNS = "{%% for message in messages %%}[{{ message.role }}] {{ message.content or '' }}%s\n{%% endfor %%}"


def written(call: str) -> str:
    return TURNS % (CALLS % call)


AS_OBJECT, AS_TEXT = False, True
FORMATS = {
    "tojson": (written("{{ call.function.arguments | tojson }}"), AS_OBJECT),
    "items": (written("{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}"), AS_OBJECT),
    "concatenated": (written("{{ call['function']['name'] + '\\n' + call['function']['arguments'] }}"), AS_TEXT),
    "printed": (written("{{ call.function.arguments }}"), AS_TEXT),
    "a text or an object": (
        written(
            "{% if call.function.arguments is string %}{{ call.function.arguments }}"
            "{% else %}{{ call.function.arguments | tojson }}{% endif %}"
        ),
        AS_OBJECT,
    ),
    "no answers of tools": (
        "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no such role') }}{% endif %}"
        + CALLS % "{{ '' + call.function.arguments }}"
        + "{% endfor %}",
        AS_TEXT,
    ),
    "DeepSeek's": (
        "{% for message in messages %}{% if message.role == 'assistant' and 'tool_calls' in message %}"
        + CALLS % "{{ '\n```json\n' + call['function']['arguments'] + '\n```' }}"
        + "{% else %}{{ message.role + ': ' + message.content }}{% endif %}{% endfor %}",
        AS_TEXT,
    ),
    "arguments that are read as JSON": (written("{{ (call.function.arguments | tojson)[1:] }}"), AS_OBJECT),
    "no calls at all": ("{% for message in messages %}{{ message.content }}{% endfor %}", AS_OBJECT),
    "nothing works": ("{{ 1 // 0 }}", AS_OBJECT),
}
FORMATS = {name: (template.replace("%%", "%"), form) for name, (template, form) in FORMATS.items()}
ARGUMENTS = '{"city": "Paris",  "days": 2}'
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
CHAT = [
    {"role": "user", "content": "how is it?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "user", "content": "and then?"},
]
FAILURES = {
    "TypeError": "{{ messages + 1 }}",
    "refused on purpose": "{{ raise_exception('refused on purpose') }}",
    "RecursionError": "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "OverflowError": "{{ 'a' * 10 ** 30 }}",
    "SecurityError": "{{ messages.__class__.__mro__ }}",
    "TemplateSyntaxError": "{% for %}",
    "UnicodeEncodeError": '{{ "\\ud83d" }}',
    "range": "{% for i in range(10 ** 9) %}a{% endfor %}",
}


@pytest.fixture(scope="module")
def named(loaded: Any) -> Iterator[InThread]:
    tokenizer = with_template(loaded[1], FORMATS["tojson"][0])
    with in_thread(lambda: (loaded[0], tokenizer), name="owner/a model", max_num_seqs=2, drain_seconds=5) as running:
        yield running


@pytest.fixture
def post(named: InThread) -> Iterator[Callable[..., tuple[int, str]]]:
    """Status and text of requests over one connection, which is never closed in between."""
    connection = http.client.HTTPConnection("127.0.0.1", named.port)
    connection.connect()
    first = connection.sock

    def post(path: str, **body: Any) -> tuple[int, str]:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert connection.sock is first, "the connection was closed"
        return answer.status, answer.read().decode()

    yield post
    connection.close()


def test_it_is_found_out_whether_a_template_takes_text(loaded: Any) -> None:
    for name, (template, expected) in FORMATS.items():
        assert takes_arguments_as_text(with_template(loaded[1], template)) == expected, name


def with_template(tokenizer: Any, template: str) -> Any:
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    return tokenizer


def test_arguments_are_given_as_text_to_a_template_that_concatenates(loaded: Any) -> None:
    tokenizer = with_template(loaded[1], FORMATS["concatenated"][0])
    with in_thread(lambda: (loaded[0], tokenizer), max_num_seqs=1, drain_seconds=5) as running:
        answer = running.http.post("/tokenize", json={"messages": CHAT})
        assert ARGUMENTS in tokenizer.decode(answer.json()["tokens"])
        body = {"messages": CHAT, "max_tokens": 2}
        assert running.http.post("/v1/chat/completions", json=body).status_code == 200


def test_a_template_that_fails_is_said_and_the_connection_stays(
    named: InThread, post: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, template in FAILURES.items():
        monkeypatch.setattr(named.server.tokenizer, "chat_template", template)
        for _ in range(2):
            status, text = post("/v1/chat/completions", messages=CHAT[:1], max_tokens=2)
            said = json.loads(text)["error"]["message"]
            assert status == 400
            assert "chat template" in said
            assert name in said or name == "TemplateSyntaxError"


def test_what_a_template_writes_beyond_the_context_never_becomes_tokens(
    named: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(named.server.tokenizer, "chat_template", "{{ 'ab ' * 10 ** 7 }}")
    for path, more in (("/v1/chat/completions", {"max_tokens": 2}), ("/tokenize", {})):
        answer = named.http.post(path, json={"messages": CHAT[:1], **more})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "30000000 characters" in refusal(answer)


def test_a_defect_is_answered_and_the_connection_stays(post: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Server, "parse", lambda *_: {}["planted"])
        status, text = post("/tokenize", prompt="a")
        assert (status, "planted" in text) == (500, False)
    assert post("/tokenize", prompt="a")[0] == 200


def test_a_model_is_found_by_its_name(named: InThread) -> None:
    listed = named.http.get("/v1/models").json()["data"]
    for path in ("owner/a%20model", "owner%2Fa%20model"):
        result = named.http.get(f"/v1/models/{path}")
        assert (result.status_code, [result.json()]) == (200, listed)
    missing = named.http.get("/v1/models/owner/another")
    assert missing.status_code == 404
    assert "owner/another" in refusal(missing)
    assert 'route="/v1/models/{model:path}"' in named.http.get("/metrics").text
