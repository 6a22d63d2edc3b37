"""Parses the tool calls that a model writes into OpenAI's `tool_calls`.

Models mark a call as their templates show them: `<tool_call>{...}</tool_call>` (Hermes, Qwen), `[TOOL_CALLS] [{...}]` and
`[TOOL_CALLS]name[ARGS]{...}` (Mistral), `<|python_tag|>{...}` or a text with only the JSON of calls (Llama). A call
of a tool that was not offered is plain text.

A text is read character by character, so that a stream holds back only characters that can still become a call.
"""

import json
import secrets
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import regex

from skipstone.serving.schemas import Tool

OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""Marks that begin a call."""
CLOSING = "</tool_call>"
ARGS = "[ARGS]"
MARKS = (*OPENINGS, CLOSING, ARGS)
"""Marks that may be special tokens. Other special tokens are not text."""
NAME, ARGUMENTS, LLAMAS_ARGUMENTS = "name", "arguments", "parameters"
"""Keys of a call's JSON."""
KEYS = (NAME, ARGUMENTS, LLAMAS_ARGUMENTS, "id", "type")
BETWEEN = " \t\r\n;,"
"""Separators between two calls."""
FIRST = "".join({one[0] for one in OPENINGS})
SPACE = " \t\r\n"
ESCAPE: Any = regex.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
WORD: Any = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
"""A number or a name of JSON."""
SURROGATE = regex.compile("[\ud800-\udfff]")

Reader = Generator[None, str, str]
"""Reads one part of a text. It is sent the characters one by one and returns the first character behind the part.
CallSyntaxError if the text is something else."""


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
        self._names, self._max_calls = tuple(names), max_calls
        self._calls: list[Call] = []
        self._held: list[str] = []  # characters that may belong to a call
        self._behind = ""  # held characters since the latest call, outside any call
        self._reading: _CallReader | None = None
        self._may_be_bare = True  # a call without a mark may come next
        self._is_bare = False  # the first call has no mark

    @property
    def found(self) -> list[Call]:
        """The calls that are complete."""
        return self._calls[: self._max_calls]

    def add(self, text: str) -> str:
        """Add a piece of text. Returns the text that can be shown now, maybe ""."""
        shown, place = list[str](), 0
        while place < len(text):
            if not self._held and not self._may_be_bare:
                end = next((at for at in range(place, len(text)) if text[at] in FIRST), len(text))
                shown.append(text[place:end])
                place = end
                if place == len(text):
                    break
            self._held.append(text[place])
            place += 1
            try:
                self._take(self._held[-1])
            except CallSyntaxError:
                first, *others = self._give_up()
                shown.append(first)
                text, place = "".join(others) + text[place:], 0
        return "".join(shown)

    def rest(self) -> str:
        """The rest of the shown text, at the end."""
        shown = list[str]()
        while self._held and not self._is_whole:
            first, *others = self._give_up()
            shown += [first, self.add("".join(others))]
        self._held = []
        return "".join(shown)

    @property
    def _is_behind_call(self) -> bool:
        """Whether nothing but separators was written since a call."""
        return self._may_be_bare and bool(self._calls)

    @property
    def _is_whole(self) -> bool:
        """Whether all that is held belongs to complete calls."""
        return self._reading is None and self._is_behind_call and not self._behind.strip(BETWEEN)

    def _take(self, character: str) -> None:
        """Read one more held character. CallSyntaxError if the held text cannot become a call."""
        if self._reading is not None:
            self._reading.take(character)
            if self._reading.is_done:
                self._end_call(self._reading)
            return
        self._behind += character
        tail, marks = self._behind, OPENINGS
        if self._may_be_bare:
            tail = tail.lstrip(BETWEEN if self._calls else SPACE)
        if self._is_behind_call:
            marks = (*OPENINGS, CLOSING)
        if tail in OPENINGS:
            self._reading = _CallReader(self._names, is_marked=True)
        elif tail in marks:
            self._end_part()
        elif tail and not any(one.startswith(tail) for one in marks):
            if not (self._may_be_bare and tail[0] in "{["):
                raise CallSyntaxError
            self._reading = _CallReader(self._names, is_marked=False)
            for one in tail:
                self._reading.take(one)

    def _end_call(self, reading: "_CallReader") -> None:
        self._is_bare = self._is_bare or not (self._calls or reading.is_marked)
        self._calls += reading.calls
        self._reading, self._may_be_bare = None, True
        self._end_part()

    def _end_part(self) -> None:
        """All held text belongs to calls. Calls without a mark may still turn out to be text."""
        self._behind = ""
        if not self._is_bare:
            self._held.clear()

    def _give_up(self) -> list[str]:
        """The characters that are held: their first is text, the others may still have marked calls among them."""
        held, self._held = self._held, []
        self._reading, self._behind, self._may_be_bare = None, "", False
        if self._is_bare:
            self._calls.clear()
            self._is_bare = False
        return held


class _CallReader:
    """Reads one call, or a list of calls, character by character.

    is_marked: whether a mark precedes it. calls: the result, once it is done.
    """

    def __init__(self, names: Sequence[str], *, is_marked: bool) -> None:
        self.names, self.is_marked = names, is_marked
        self.calls: list[Call] = []
        self.is_done = False
        self._read: list[str] = []
        self._reader = self._all()
        next(self._reader)

    def take(self, character: str) -> None:
        """Read one more character. CallSyntaxError if no call begins like this."""
        self._read.append(character)
        try:
            self._reader.send(character)
        except StopIteration:
            self.is_done = True

    def _all(self) -> Generator[None, str, None]:
        char = yield from _space((yield))
        if char == "{":
            yield from self._call()
        elif char == "[":
            while char != "]":
                if (yield from _space((yield))) != "{":
                    raise CallSyntaxError
                yield from self._call()
                if (char := (yield from _space((yield)))) not in (",", "]"):
                    raise CallSyntaxError
        elif self.is_marked:
            name = yield from self._name(char)
            start = len(self._read) - 1
            yield from _container("{")
            self._add(name, "".join(self._read[start:]))
        else:
            raise CallSyntaxError

    def _name(self, char: str) -> Reader:
        """Mistral's name before the arguments. Returns it when their first character was read."""
        name = ""
        while char not in SPACE + "[{":
            name += char
            if not any(one.startswith(name) for one in self.names):
                raise CallSyntaxError
            char = yield
        if name not in self.names:
            raise CallSyntaxError
        if (char := (yield from _space(char))) == "[":
            yield from _exactly(ARGS[1:])
            char = yield from _space((yield))
        if char != "{":
            raise CallSyntaxError
        return name

    def _call(self) -> Generator[None, str, None]:
        """A call's object behind its first character."""
        written, char = dict[str, str](), ","
        while char != "}":
            if char != "," or (yield from _space((yield))) != '"':
                raise CallSyntaxError
            key = yield from _one_of([one for one in KEYS if one not in written])
            char = yield from _colon((yield))
            start = len(self._read) - 1
            if key == NAME:
                if char != '"':
                    raise CallSyntaxError
                yield from _one_of(self.names)
                char = yield
            elif key in (ARGUMENTS, LLAMAS_ARGUMENTS) and char not in '{"n':
                raise CallSyntaxError
            else:
                char = yield from _value(char)
            written[key] = "".join(self._read[start:-1])
            char = yield from _space(char)
        if NAME not in written:
            raise CallSyntaxError
        self._add(json.loads(written[NAME]), written.get(ARGUMENTS, written.get(LLAMAS_ARGUMENTS, "{}")))

    def _add(self, name: str, arguments: str) -> None:
        if arguments == "null":  # as for a tool that takes none
            arguments = "{}"
        if arguments.startswith('"'):
            arguments = _object_in(arguments)
        self.calls.append(Call(f"call_{secrets.token_hex(12)}", name, arguments))


def _object_in(text: str) -> str:
    """The JSON object within a JSON string, as some models write arguments. CallSyntaxError for anything else."""
    inner: str = json.loads(text).strip(SPACE)
    if not inner.startswith("{"):
        raise CallSyntaxError
    reader, left = _container("{"), len(inner)
    next(reader)
    try:
        for left in range(len(inner) - 1, 0, -1):
            reader.send(inner[-left])
    except StopIteration:
        if left == 1:
            return SURROGATE.sub(lambda one: f"\\u{ord(one[0]):04x}", inner)
    raise CallSyntaxError


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


# ------------------------------------------------------------------------------------------ readers of the parts of JSON


def _space(char: str) -> Reader:
    """Space, if there is any. char: the first character, here and below."""
    while char in SPACE:
        char = yield
    return char


def _exactly(text: str) -> Generator[None, str, None]:
    """Just this text."""
    for expected in text:
        if (yield) != expected:
            raise CallSyntaxError


def _one_of(options: Sequence[str]) -> Reader:
    """One of some texts and the quote behind it. Returns the text."""
    text = ""
    while (char := (yield)) != '"':
        text += char
        if not any(one.startswith(text) for one in options):
            raise CallSyntaxError
    if text not in options:
        raise CallSyntaxError
    return text


def _colon(char: str) -> Reader:
    """A colon between spaces."""
    if (yield from _space(char)) != ":":
        raise CallSyntaxError
    return (yield from _space((yield)))


def _value(char: str) -> Reader:
    """Any value."""
    if char in "{[":
        yield from _container(char)
        return (yield)
    return (yield from _scalar(char))


def _container(char: str) -> Generator[None, str, None]:
    """An object or an array behind its first character, with all that it contains. It keeps a stack of its own, as models nest
    deeper than functions can."""
    closings = list[str]()
    while True:
        if char in "{[":
            closings.append("}" if char == "{" else "]")
            if (char := (yield from _space((yield)))) != closings[-1]:
                char = yield from _item(char, closings[-1])
                continue
        else:
            char = yield from _space((yield from _scalar(char)))
        while char == closings[-1]:
            closings.pop()
            if not closings:
                return
            char = yield from _space((yield))
        if char != ",":
            raise CallSyntaxError
        char = yield from _item((yield from _space((yield))), closings[-1])


def _item(char: str, closing: str) -> Reader:
    """The key of an object's value, nothing of an array's. Returns the value's first character."""
    if closing == "]":
        return char
    if char != '"':
        raise CallSyntaxError
    yield from _string()
    return (yield from _colon((yield)))


def _scalar(char: str) -> Reader:
    """A string, a number, true, false or null."""
    if char == '"':
        yield from _string()
        return (yield)
    text = char
    while WORD.fullmatch(text, partial=True):
        char = yield
        text += char
    if not WORD.fullmatch(text[:-1]):
        raise CallSyntaxError
    return char


def _string() -> Generator[None, str, None]:
    """A string behind its first quote."""
    escape = ""
    while (char := (yield)) != '"' or escape:
        if escape or char == "\\":
            escape += char
            if (match := ESCAPE.fullmatch(escape, partial=True)) is None:
                raise CallSyntaxError
            escape = escape if match.partial else ""
        elif char < " ":
            raise CallSyntaxError
