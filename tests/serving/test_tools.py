"""Calls of tools in what a model writes: every form that templates have, in one piece and letter by letter."""

from __future__ import annotations

import json

import pytest

from skipstone.serving.schemas import Function, Tool
from skipstone.serving.tools import Calls, parsed, schema_of

NAMES = frozenset({"weather", "add"})
WEATHER = '{"name": "weather", "arguments": {"city": "Bern"}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'


def told(text: str) -> list[tuple[str, dict[str, object]]]:
    return [(one.name, json.loads(one.arguments)) for one in parsed(text, NAMES)]


@pytest.mark.parametrize(
    "text",
    [
        f"<tool_call>\n{WEATHER}\n</tool_call>\n<tool_call>\n{ADD}\n</tool_call>",
        f"[TOOL_CALLS] [{WEATHER}, {ADD}]",
        '[TOOL_CALLS]weather[ARGS]{"city": "Bern"}[TOOL_CALLS]add{"a": 1, "b": [2, {"c": "}"}]}',
        f"<|python_tag|>{WEATHER}; {ADD}",
        f"{WEATHER}\n{ADD}".replace("arguments", "parameters"),
        f"[{WEATHER}, {ADD}]",
    ],
)
def test_all_forms_of_calls_are_read(text: str) -> None:
    assert told(text) == [("weather", {"city": "Bern"}), ("add", {"a": 1, "b": [2, {"c": "}"}]})]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "The weather is fine.",
        '{"name": "delete", "arguments": {}}',
        '{"name": "weather", "arguments": 3}',
        '{"name": "weather", "arguments": "Bern"}',
        '{"name": "weather", "arguments": {}, "temperature": 3}',
        WEATHER[:-1],
        f"{WEATHER} is what I would do",
        f"<tool_call>{WEATHER}</tool_call> and then",
        "[]",
        "[1, 2]",
        '{"name": ["weather"], "arguments": {}}',
        '{"name": {"first": "A"}}',
        '{"name": "weather", "arguments": {"degrees": NaN}}',
        '{"name": "weather", "arguments": "{\\"degrees\\": Infinity}"}',
        "[" * 5000,
        "<tool_call>weather" + " " * 50_000 + "x",
    ],
)
def test_what_is_no_call_or_not_only_calls_is_text(text: str) -> None:
    assert parsed(text, NAMES) == []


def test_arguments_may_be_json_in_a_text_and_every_call_has_an_id_of_its_own() -> None:
    found = parsed('[{"name": "add", "arguments": "{\\"a\\": 1}"}, {"name": "add", "arguments": {}}]', NAMES)
    assert [one.arguments for one in found] == ['{"a": 1}', "{}"]
    assert found[0].id != found[1].id


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "shown", "called"),
    [
        (f"I look it up.\n<tool_call>\n{WEATHER}\n</tool_call>", "I look it up.\n", 1),
        (f"<tool_call>{WEATHER}</tool_call>", "", 1),
        (f"[TOOL_CALLS][{WEATHER}]", "", 1),
        (WEATHER, "", 1),
        ("a < b and [TOOL, <tool_", "a < b and [TOOL, <tool_", 0),
        ("[1, 2, 3] is a list", "[1, 2, 3] is a list", 0),
        ('{"name": "weather"', '{"name": "weather"', 0),
        (f'see {{"x": 1}} and {WEATHER}', f'see {{"x": 1}} and {WEATHER}', 0),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", 0),
        ("  \n", "  \n", 0),
    ],
)
def test_a_stream_shows_what_is_no_call_and_holds_back_what_may_be_one(text: str, shown: str, called: int, size: int) -> None:
    calls = Calls(NAMES)
    found = "".join(calls.add(text[place : place + size]) for place in range(0, len(text), size))
    assert text.startswith(found)
    assert found + calls.rest() == shown
    assert len(calls.found) == called


def test_text_is_shown_as_soon_as_it_can_be_no_call() -> None:
    calls = Calls(NAMES)
    assert calls.add("Hello <to") == "Hello "
    assert calls.add("day>") == "<today>"


def test_where_a_call_is_demanded_nothing_is_shown_before_the_end() -> None:
    calls = Calls(NAMES, only=True)
    assert calls.add(WEATHER[:5]) + calls.add(WEATHER[5:]) + calls.rest() == ""
    assert [one.name for one in calls.found] == ["weather"]


def test_what_json_cannot_say_in_utf_8_stays_escaped() -> None:
    (call,) = parsed('{"name": "weather", "arguments": {"city": "\\ud83d"}}', NAMES)
    assert call.arguments.encode() == b'{"city": "\\ud83d"}'


def test_no_more_calls_than_are_wanted() -> None:
    calls = Calls(NAMES, most=1)
    assert calls.add(f"[{WEATHER}, {ADD}]") + calls.rest() == ""
    assert [one.name for one in calls.found] == ["weather"]


def test_a_schema_that_refers_to_itself_does_so_where_it_stands() -> None:
    point = {"type": "object", "properties": {"x": {"type": "integer"}}}
    there = {"$ref": "#/$defs/P"}
    parameters = {"$defs": {"P": point}, "type": "object", "properties": {"a": there, "b": {"anyOf": [there]}}}
    tools = [Tool(type="function", function=Function(name=name, parameters=parameters)) for name in ("one", "two")]
    found = schema_of(tools)["anyOf"][1]["properties"]["arguments"]["properties"]
    place = {"$ref": "#/anyOf/1/properties/arguments/$defs/P"}
    assert found == {"a": place, "b": {"anyOf": [place]}}
