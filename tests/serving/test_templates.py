"""Chat templates that want a call's arguments as text, and such as fail: 400 with what they say, and the connection stays."""

from __future__ import annotations

import copy
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from skipstone.serving.request_parser import takes_arguments_as_text
from skipstone.serving.server import Server
from tests.helpers.served import InThread, in_thread, refusal

CALLS = "{%% for call in message.tool_calls or [] %%}<call>%s</call>{%% endfor %%}"
TURNS = "{%% for message in messages %%}[{{ message.role }}] {{ message.content or '' }}%s\n{%% endfor %%}"


def written(call: str) -> str:
    """A template that writes a call so."""
    return TURNS % (CALLS % call)


AS_OBJECT, AS_TEXT = False, True
FORMATS = {
    "tojson": (written("{{ call.function.arguments | tojson }}"), AS_OBJECT),
    "items": (written("{% for key, value in call.function.arguments.items() %}{{ key }}={{ value }}{% endfor %}"), AS_OBJECT),
    "concatenated": (written("{{ call['function']['name'] + '\\n' + call['function']['arguments'] }}"), AS_TEXT),
    "printed": (written("{{ call.function.arguments }}"), AS_TEXT),
    "joined with ~": (written("{{ call.function.name ~ call.function.arguments }}"), AS_TEXT),
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
    "ZeroDivisionError": "{{ 1 // (messages | length - 1) }}",
    "UndefinedError": "{{ messages[0].nothing.more }}",
    "refused on purpose": "{{ raise_exception('refused on purpose') }}",
    "RecursionError": "{% macro again(n) %}{{ again(n + 1) }}{% endmacro %}{{ again(0) }}",
    "OverflowError": "{{ 'a' * 10 ** 30 }}",
    "SecurityError": "{{ messages.__class__.__mro__ }}",
    "TemplateSyntaxError": "{% for %}",
    "UnicodeEncodeError": '{{ "\\ud83d" }}',
    "range": "{% for i in range(10 ** 9) %}a{% endfor %}",
}


@pytest.fixture(scope="module")
def server(loaded: Any) -> Iterator[InThread]:
    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.chat_template = FORMATS["tojson"][0]
    with in_thread(lambda: (loaded[0], tokenizer), max_num_seqs=2, max_waiting=8, drain_seconds=5) as running:
        yield running


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_found_out_whether_a_template_takes_text(loaded: Any, name: str) -> None:
    template, expected = FORMATS[name]
    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.chat_template = template
    assert takes_arguments_as_text(tokenizer) == expected


def test_arguments_are_given_as_text_to_a_template_that_concatenates(loaded: Any) -> None:
    tokenizer = copy.deepcopy(loaded[1])
    tokenizer.chat_template = FORMATS["concatenated"][0]
    with in_thread(lambda: (loaded[0], tokenizer), max_num_seqs=1, drain_seconds=5) as running:
        answer = running.http.post("/tokenize", json={"messages": CHAT})
        assert answer.status_code == 200
        assert ARGUMENTS in tokenizer.decode(answer.json()["tokens"])
        body = {"messages": CHAT, "max_tokens": 2}
        assert running.http.post("/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("name", FAILURES)
def test_a_template_that_fails_is_said_and_the_connection_stays(
    server: InThread, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.server.tokenizer, "chat_template", FAILURES[name])
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.connect()
    first = connection.sock
    for _ in range(2):
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps({"messages": CHAT[:1], "max_tokens": 2}), headers)
        answer = connection.getresponse()
        said = json.loads(answer.read())["error"]["message"]
        assert answer.status == 400
        assert "chat template" in said
        assert name in said or name == "TemplateSyntaxError"
        assert connection.sock is first, "the connection was closed"
    connection.close()


def test_what_a_template_writes_beyond_the_context_never_becomes_tokens(
    server: InThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server.server.tokenizer, "chat_template", "{{ 'ab ' * 10 ** 7 }}")
    for path, more in (("/v1/chat/completions", {"max_tokens": 2}), ("/tokenize", {})):
        answer = server.http.post(path, json={"messages": CHAT[:1], **more})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "30000000 characters" in refusal(answer)


def test_a_request_brings_no_template(server: InThread) -> None:
    for name, value in (("chat_template", "{{ 'a' * 10 ** 9 }}"), ("chat_template_kwargs", {"a": 1})):
        answer = server.http.post("/v1/chat/completions", json={"messages": CHAT[:1], name: value})
        assert answer.status_code == 400
        assert name in refusal(answer)


def test_a_defect_is_answered_and_the_connection_stays(server: InThread, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise KeyError("planted")

    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.connect()
    first = connection.sock
    with monkeypatch.context() as patched:
        patched.setattr(Server, "parse", fails)
        connection.request("POST", "/tokenize", json.dumps({"prompt": "a"}), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert (answer.status, "planted" in answer.read().decode()) == (500, False)
    connection.request("POST", "/tokenize", json.dumps({"prompt": "a"}), {"Content-Type": "application/json"})
    assert connection.getresponse().status == 200
    assert connection.sock is first
    connection.close()


def test_a_model_is_found_by_its_name(loaded: Any) -> None:
    with in_thread(lambda: loaded, name="owner/a model", max_num_seqs=1, drain_seconds=5) as running:
        listed = running.http.get("/v1/models").json()["data"]
        for path in ("owner/a%20model", "owner%2Fa%20model"):
            found = running.http.get(f"/v1/models/{path}")
            assert found.status_code == 200
            assert [found.json()] == listed
        missing = running.http.get("/v1/models/owner/another")
        assert missing.status_code == 404
        assert "owner/another" in refusal(missing)
        assert running.counted("http_requests_total") >= 3
        assert 'route="/v1/models/{model:path}"' in running.http.get("/metrics").text
