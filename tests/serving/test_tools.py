"""Calls of tools in what a model writes: every form that templates have, in one piece and letter by letter."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skipstone.serving.api_schemas import Function, Tool
from skipstone.serving.tool_call_parser import ToolCallParser, argument_schemas

NAMES = frozenset({"weather", "add"})
WEATHER = '{"name": "weather", "arguments": {"city": "Bern"}}'
ADD = '{"name": "add", "arguments": {"a": 1, "b": [2, {"c": "}"}]}}'


def read(text: str, size: int | None = None) -> tuple[str, list[tuple[str, str]]]:
    calls, size = ToolCallParser(NAMES), size or max(len(text), 1)
    shown = "".join(calls.add(text[place : place + size]) for place in range(0, len(text), size)) + calls.rest()
    return shown, [(one.name, one.arguments) for one in calls.found]


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
    result = [(name, json.loads(arguments)) for name, arguments in read(text)[1]]
    assert result == [("weather", {"city": "Bern"}), ("add", {"a": 1, "b": [2, {"c": "}"}]})]


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"name": "delete", "arguments": {}}',
        '{"name": "weather", "arguments": 3}',
        '{"name": "weather", "arguments": {}, "temperature": 3}',
        WEATHER[:-1],
        f"{WEATHER} is what I would do",
        "[]",
        '{"name": ["weather"], "arguments": {}}',
        '{"name": {"first": "A"}}',
        '{"name": "weather", "arguments": {"degrees": NaN}}',
        '{"name": "weather", "arguments": "{\\"degrees\\": Infinity}"}',
        "[" * 5000,
        "<tool_call>weather" + " " * 50_000 + "x",
    ],
)
def test_what_is_no_call_or_not_only_calls_is_text(text: str) -> None:
    assert read(text) == (text, [])


def test_arguments_may_be_json_in_a_text_and_every_call_has_an_id_of_its_own() -> None:
    calls = ToolCallParser(NAMES)
    calls.add('[{"name": "add", "arguments": "{\\"a\\": 1}"}, {"name": "add", "arguments": {}}]')
    assert [one.arguments for one in calls.found] == ['{"a": 1}', "{}"]
    assert calls.found[0].id != calls.found[1].id
    calls = ToolCallParser(NAMES, max_calls=1)
    assert calls.add(f"[{WEATHER}, {ADD}]") + calls.rest() == ""
    assert [one.name for one in calls.found] == ["weather"]


@pytest.mark.parametrize(
    "arguments",
    ['{"a": 1e999}', '{"a":-1e-999,"b" : 1.0}', '{"a": "\\ud83d"}', '{"a": "\\u00fc"}', '{"a": "ü"}', '{"a": 1, "a": 2}'],
)
def test_arguments_are_the_json_that_the_model_wrote(arguments: str) -> None:
    nested = json.dumps({"name": "weather", "arguments": arguments}, ensure_ascii=False)
    for text in (f'{{"name": "weather", "arguments": {arguments}}}', f"[TOOL_CALLS]weather[ARGS]{arguments}", nested):
        assert read(text)[1] == [("weather", arguments)]


def test_an_unpaired_surrogate_in_arguments_within_a_text_stays_escaped() -> None:
    for written, arguments in (("\\ud83d", '{"city": "\\ud83d"}'), ("\\ud83d\\ude00", '{"city": "😀"}')):
        text = f'{{"name": "weather", "arguments": "{{\\"city\\": \\"{written}\\"}}"}}'
        assert read(text)[1] == [("weather", arguments)]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "01", "1.", ".5", "+1", "0x1", "1e"])
def test_arguments_that_are_no_json_are_text(number: str) -> None:
    for text in (f'{{"name": "weather", "arguments": {{"a": {number}}}}}', f'<tool_call>weather{{"a": {number}}}</tool_call>'):
        assert read(text) == (text, [])


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text('aä"\\\n {}[]é😀', max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('ab"\\{}😀', max_size=5), inner, max_size=3),
    max_leaves=9,
)


@given(
    st.dictionaries(st.text('ab"\\{}😀', max_size=5), VALUES, max_size=3),
    st.sampled_from([None, 1]),
    st.booleans(),
    st.integers(1, 9),
)
def test_any_json_object_is_read_as_python_reads_it(
    arguments: dict[str, object], indent: int | None, ascii: bool, size: int
) -> None:
    written = json.dumps(arguments, indent=indent, ensure_ascii=ascii)
    text = f'<tool_call>{{"arguments": {written}, "name": "add"}}</tool_call>'
    assert read(text, size) == ("", [("add", written)])
    cut = text[: -len(', "name": "add"}</tool_call>') - 1]
    assert read(cut, size) == (cut, []), "it may have been a call"


FRAGMENTS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "weather", "add", "{}", '{"a": 1}']
FRAGMENTS += [*'{}[]",; <x', "\n", "<tool", '"name"', ": ", '{"name": "add", "arguments": {', WEATHER, ADD]


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join), st.integers(1, 5))
def test_pieces_do_not_matter_and_no_text_is_lost(text: str, size: int) -> None:
    shown, result = read(text, size)
    assert (shown, result) == read(text)
    if not result:
        assert shown == text


@pytest.mark.parametrize(
    ("text", "shown_after"),
    [
        ("[1, 2, 3]", "[1"),
        ('{"answer": 42}', '{"an'),
        ('{"name": "Anna"}', '{"name": "A'),
        ('{"name": "added"}', '{"name": "adde'),
        ('{"name": 3}', '{"name": 3'),
        ('{"name": "add", "arguments": [1]}', '{"name": "add", "arguments": ['),
        ('{"name": "add", "arguments": {oops}', '{"name": "add", "arguments": {o'),
        (f"{ADD} is", f"{ADD} i"),
        ("  {]", "  {]"),
        ("<tool_call>none", "<tool_call>n"),
        ("<tool_call>{]", "<tool_call>{]"),
        ("[TOOL_CALLS]weather report", "[TOOL_CALLS]weather r"),
        ("<|python_tag|>print(1)", "<|python_tag|>p"),
    ],
)
def test_nothing_is_held_back_any_longer_than_it_may_be_a_call(text: str, shown_after: str) -> None:
    calls = ToolCallParser(NAMES)
    shown = [calls.add(character) for character in text]
    first = next(place for place, piece in enumerate(shown) if piece)
    assert text[: first + 1] == shown_after
    assert shown[first] == shown_after.removesuffix("["), "which may begin a mark"


@pytest.mark.parametrize(
    ("text", "shown", "called"),
    [
        (f"<tool_call>{WEATHER}</tool_call> and then", " and then", 1),
        (f"<tool_call>{WEATHER}</tool_call>\nfirst\n<tool_call>{ADD}</tool_call>\n", "\nfirst\n", 2),
        (f"<tool_call>{WEATHER}</tool_call>\n<tool_call>{{broken</tool_call>", "\n<tool_call>{broken</tool_call>", 1),
        (f"[TOOL_CALLS][{WEATHER}] done", " done", 1),
        (f"{WEATHER} is a call", f"{WEATHER} is a call", 0),
        (f"\n\n<tool_call>{WEATHER}", "", 1),
        (f"I look it up.\n<tool_call>\n{WEATHER}\n</tool_call>", "I look it up.\n", 1),
        (f'see {{"x": 1}} and {WEATHER}', f'see {{"x": 1}} and {WEATHER}', 0),
        ("<tool_call>{broken</tool_call>", "<tool_call>{broken</tool_call>", 0),
        ("a < b and [TOOL, <tool_", "a < b and [TOOL, <tool_", 0),
    ],
)
def test_text_around_marked_calls_is_shown(text: str, shown: str, called: int) -> None:
    result = read(text, 3)
    assert (result[0], len(result[1])) == (shown, called)


def test_parameters_are_those_of_an_object() -> None:
    def request(parameters: dict[str, object] | None) -> dict[str, object]:
        (result,) = argument_schemas([Tool(type="function", function=Function(name="add", parameters=parameters))])
        return result[1]

    assert request(None) == request({}) == {"type": "object"}
    there = {"type": "object", "properties": {"a": {"$ref": "#"}, "b": {"enum": [{"$ref": "#/x"}]}}}
    assert request(there) == there, "nothing in them is rewritten"
    with pytest.raises(ValueError, match=r"add.*object"):
        request({"type": "string"})
