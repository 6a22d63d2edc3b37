"""Parses the tool calls that a model writes into OpenAI's `tool_calls`.

Models mark a call as their templates show them: `<tool_call>{...}</tool_call>` (Hermes, Qwen), `[TOOL_CALLS] [{...}]` and
`[TOOL_CALLS]name[ARGS]{...}` (Mistral), `<|python_tag|>{...}` or a text with only the JSON of calls (Llama). A call
of a tool that was not offered is plain text.

A text is read token by token as it comes. A token that may still become the next part of a call is held back, nothing else.
"""

import json
import secrets
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from skipstone.serving.api_schemas import Tool, finite

CLOSING = "</tool_call>"
MARKS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", CLOSING, "[ARGS]")
"""Marks that may be special tokens. Other special tokens are not text."""
NAME, ARGUMENTS, LLAMAS_ARGUMENTS = "name", "arguments", "parameters"
"""Keys of a call's JSON."""
BETWEEN = " \t\r\n;,"
"""Separators between two calls."""
SPACE = r"[ \t\r\n]*"
SCALAR = r"(?:-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null)(?=[ \t\r\n,\]}])"
VALUE = rf'(?:(?P<opening>[{{\[])|(?P<quote>")|{SCALAR})'
"""The first token of a JSON value."""
OPENING = r"<tool_call>|\[TOOL_CALLS\]|<\|python_tag\|>"
BARE = rf"(?P<bare>(?=\{{|\[{SPACE}\{{))"
"""A call, or a list of calls, without a mark."""

SPACES: Any = regex.compile(SPACE)
MARK: Any = regex.compile(OPENING)
FIRST_PART: Any = regex.compile(rf"{OPENING}|{BARE}|(?P<closing>(?!))")
NEXT_PART: Any = regex.compile(rf"[{BETWEEN}]*(?:{OPENING}|{BARE}|(?P<closing>{CLOSING}))")
STRING_PART: Any = regex.compile(r'[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|(?P<end>")')
"""A part of a JSON string behind its first quote."""
NEXT_ITEM: dict[tuple[str, bool], Any] = {
    ("}", True): regex.compile(r'(?P<end>\})|(?P<key>")'),
    ("}", False): regex.compile(rf'(?P<end>\}})|,{SPACE}(?P<key>")'),
    ("]", True): regex.compile(rf"(?P<end>\])|{VALUE}"),
    ("]", False): regex.compile(rf"(?P<end>\])|,{SPACE}{VALUE}"),
}
"""(closing bracket, whether nothing precedes it) -> the next item of an object or an array, or its end."""
VALUE_OF_KEY: Any = regex.compile(rf":{SPACE}{VALUE}")
NEXT_MEMBER: Any = regex.compile(r"(?P<end>\})|,")
NEXT_CALL: Any = regex.compile(rf"(?P<end>\])|,{SPACE}\{{")
SURROGATE = regex.compile("[\ud800-\udfff]")

Reader = Generator[Any, Any, Any]
"""Reads one part of a text. It yields the pattern of the next token and is sent the match."""


class CallSyntaxError(ValueError):
    """The text is not the beginning of a call."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a tool. arguments: the JSON that the model wrote."""

    id: str
    name: str
    arguments: str

    def body(self, index: int | None = None) -> dict[str, Any]:
        """The call as OpenAI's JSON. index: its place, in a chunk of a stream."""
        place = {} if index is None else {"index": index}
        return {**place, "id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class ToolCallParser:
    """Splits the text of one answer into shown text and tool calls.

    names: of the offered tools. max_calls: only the first calls are reported; None for all.

    A marked call counts wherever it stands. JSON without a mark counts after a marked call, or if the text is nothing else.
    """

    def __init__(self, names: Iterable[str], *, max_calls: int | None = None) -> None:
        self._max_calls = max_calls
        self._calls: list[Call] = []
        named = "|".join(map(regex.escape, names))
        self._first_token: Any = regex.compile(rf"\{{|(?P<list>\[){SPACE}\{{|(?P<name>{named}){SPACE}(?:\[ARGS\]{SPACE})?\{{")
        arguments = r'(?P<opening>\{)|(?P<quote>")|null'
        values = {NAME: f'"(?:{named})"', ARGUMENTS: arguments, LLAMAS_ARGUMENTS: arguments, "id": VALUE, "type": VALUE}
        self._members = {key: rf'"(?P<key>{key})"{SPACE}:{SPACE}(?P<value>{value})' for key, value in values.items()}
        self._is_bare = False  # the first call has no mark
        self._may_be_call = True  # of the held text
        self._text = ""  # that is held
        self._begin()

    @property
    def found(self) -> list[Call]:
        """The calls that are complete."""
        return self._calls[: self._max_calls]

    def add(self, text: str) -> str:
        """Add a piece of text. Returns the text that can be shown now, maybe ""."""
        shown = list[str]()
        self._text += text
        while True:
            if not self._may_be_call:
                mark = MARK.search(self._text, partial=True)
                shown.append(self._text[: mark.start()])
                self._text = self._text[mark.start() :]
                if mark.partial:
                    break
                self._may_be_call = True
                self._begin()
            try:
                self._read_on()
                break
            except CallSyntaxError:
                shown.append(self._give_up())
        return "".join(shown)

    def rest(self) -> str:
        """The rest of the shown text, at the end."""
        shown = list[str]()
        while self._text and not self._is_whole:
            shown += [self._give_up(), self.add("")]
        self._text = ""
        return "".join(shown)

    @property
    def _is_whole(self) -> bool:
        """Whether all that is held belongs to complete calls."""
        return self._may_be_call and self._expected is NEXT_PART and not self._text[self._place :].strip(BETWEEN)

    def _begin(self) -> None:
        """Read the held text from its beginning. _place: end of the tokens that were read. _expected: the next one."""
        self._reader, self._place = self._read_parts(), 0
        self._expected = next(self._reader)

    def _read_on(self) -> None:
        """Read the held text as far as it goes. CallSyntaxError if it is no beginning of calls."""
        while True:
            if self._expected is not STRING_PART:
                self._place = SPACES.match(self._text, self._place).end()
            match = self._expected.match(self._text, self._place, partial=True)
            if match is None:
                raise CallSyntaxError
            if match.partial:
                return
            self._place = match.end()
            self._expected = self._reader.send(match)

    def _give_up(self) -> str:
        """The first character that is held: it is text, and the others may still have marked calls among them."""
        first, self._text = self._text[0], self._text[1:]
        self._may_be_call = False
        if self._is_bare:
            self._calls.clear()
            self._is_bare = False
        return first

    # ------------------------------------------------------------------------------------------------------- readers

    def _read_parts(self) -> Reader:
        """Calls, as long as nothing else comes. Calls without a mark stay held, because they may still turn out to be text."""
        while True:
            part = yield NEXT_PART if self._calls else FIRST_PART
            if not part["closing"]:
                calls = yield from self._read_calls()
                self._is_bare |= part["bare"] is not None and not self._calls
                self._calls += calls
            if not self._is_bare:
                self._text, self._place = self._text[self._place :], 0

    def _read_calls(self) -> Reader:
        """A call, or a list of calls. Returns them."""
        first = yield self._first_token
        if first["name"]:
            start = self._place - 1
            yield from _read_value({"opening": "{"})
            return [_call(first["name"], self._text[start : self._place])]
        calls = [(yield from self._read_object())]
        while first["list"] and not (yield NEXT_CALL)["end"]:
            calls.append((yield from self._read_object()))
        return calls

    def _read_object(self) -> Reader:
        """A call's object behind its first character. Returns the call."""
        written, has_ended = dict[str, str](), False
        while not has_ended:
            missing = [member for key, member in self._members.items() if key not in written]
            member = yield regex.compile("|".join(missing) or "(?!)")
            yield from _read_value(member.groupdict())
            written[member["key"]] = self._text[member.start("value") : self._place]
            has_ended = bool((yield NEXT_MEMBER)["end"])
        if NAME not in written:
            raise CallSyntaxError
        return _call(written[NAME][1:-1], written.get(ARGUMENTS, written.get(LLAMAS_ARGUMENTS, "{}")))


def _call(name: str, arguments: str) -> Call:
    """A call with an id. CallSyntaxError if its arguments are a string that is no JSON object, as some models write them."""
    if arguments == "null":  # as for a tool that takes none
        arguments = "{}"
    if arguments.startswith('"'):
        inner: str = json.loads(arguments).strip(" \t\r\n")
        try:
            value = json.loads(inner, parse_constant=finite)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise CallSyntaxError
        arguments = SURROGATE.sub(lambda one: f"\\u{ord(one[0]):04x}", inner)
    return Call(f"call_{secrets.token_hex(12)}", name, arguments)


def _read_value(first: Mapping[str, str | None]) -> Reader:
    """The rest of a JSON value. first: groups of its first token. It keeps a stack of its own, as models nest deeper than
    functions can."""
    closings, token = list[str](), first
    while True:
        if opening := token.get("opening"):
            closings.append("}" if opening == "{" else "]")
        elif token.get("quote"):
            yield from _read_string()
        elif token.get("end"):
            closings.pop()
        if not closings:
            return
        token = (yield NEXT_ITEM[closings[-1], bool(opening)]).groupdict()
        if token.get("key"):
            yield from _read_string()
            token = (yield VALUE_OF_KEY).groupdict()


def _read_string() -> Reader:
    """A JSON string behind its first quote."""
    while not (yield STRING_PART)["end"]:
        pass


def argument_schemas(tools: Sequence[Tool]) -> list[tuple[str, dict[str, Any]]]:
    """Name and JSON schema of the arguments of every tool. ValueError if arguments cannot be an object."""
    found = list[tuple[str, dict[str, Any]]]()
    for one in tools:
        name, schema = one.function.name, {"type": "object", **(one.function.parameters or {})}
        types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        if "object" not in types:
            raise ValueError(f"tools: parameters of {name} must be the schema of an object, found type {schema['type']!r}")
        found.append((name, schema))
    return found
