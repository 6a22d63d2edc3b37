"""Tools: what a model writes to have one called, parsed back into OpenAI's `tool_calls`.

Models mark a call as their templates show them: `<tool_call>{...}</tool_call>` (Hermes, Qwen), `[TOOL_CALLS] [{...}]` and
`[TOOL_CALLS]name[ARGS]{...}` (Mistral), `<|python_tag|>{...}` or a text that is nothing but the JSON of calls (Llama). What
names no tool that was offered is text like any other.
"""

import json
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from skipstone.serving.schemas import Function, Tool

OPENINGS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>")
"""What a call may begin with."""
CLOSING = "</tool_call>"
MARKS = (*OPENINGS, CLOSING, "[ARGS]")
"""What tokenizers may have as special tokens, which are no text otherwise."""
NAME, ARGUMENTS, LLAMAS_ARGUMENTS = "name", "arguments", "parameters"
"""Keys of a call's JSON."""
NAMED = re.compile(r"([\w.-]{1,64})\s*(?:\[ARGS\]\s*)?(?=\{)")
"""A name before its arguments."""
BETWEEN = re.compile(r"[\s;,]*")
"""What may stand between two calls."""


@dataclass(frozen=True, slots=True)
class Call:
    """A tool that is to be called. arguments: JSON, as a text."""

    id: str
    name: str
    arguments: str

    def told(self, index: int | None = None) -> dict[str, Any]:
        """As OpenAI's JSON. index: its place, in a chunk of a stream."""
        place = {} if index is None else {"index": index}
        return {**place, "id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


class Calls:
    """The text of one answer to a request that offers tools, split into what is shown and what is a call.

    names: of the tools that may be called. only: whether the whole text is calls, as where a request demands one. most: calls
    that are told, those that were written first; None for all."""

    def __init__(self, names: Iterable[str], *, only: bool = False, most: int | None = None) -> None:
        self.names, self.most = frozenset(names), most
        self.found: list[Call] = []
        self._held = ""  # not shown, as it may be a call
        self._begun = only  # whether what is held is one
        self._shown = False

    def add(self, text: str) -> str:
        """The part of a further piece of text that is shown by now; may be empty."""
        self._held += text
        if self._begun:
            return ""
        place = min([at for one in OPENINGS if (at := self._held.find(one)) >= 0], default=-1)
        if place < 0 and not self._shown and self._held.lstrip()[:1] in ("", "{", "["):
            self._begun = bool(self._held.strip())
            return ""
        if place >= 0:
            self._begun = True
            return self._show(place)
        return self._show(len(self._held) - _begun(self._held))

    def rest(self) -> str:
        """What is shown of the rest, when all is written; `found` has the calls."""
        text, self._held = self._held, ""
        self.found = parsed(text, self.names)[: self.most]
        return "" if self.found else text

    def _show(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        self._shown = self._shown or bool(text.strip())
        return text


def _begun(text: str) -> int:
    """How many characters at the end of a text are the beginning of an opening."""
    longest = max(map(len, OPENINGS)) - 1
    ends = range(min(longest, len(text)), 0, -1)
    return next((size for size in ends if any(one.startswith(text[-size:]) for one in OPENINGS)), 0)


def parsed(text: str, names: frozenset[str]) -> list[Call]:
    """The calls that a text is made of, one after another; none where any part of it is anything else, or names no tool."""
    found, rest = [], text.strip()
    while rest:
        for opening in OPENINGS:
            rest = rest.removeprefix(opening).lstrip()
        named = NAMED.match(rest)
        rest = rest[named.end() :] if named else rest
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError):
            return []
        if named:
            value = {NAME: named[1], ARGUMENTS: value}
        calls = [_call(one, names) for one in (value if isinstance(value, list) else [value])]
        if None in calls or not calls:
            return []
        found += [one for one in calls if one is not None]
        rest = rest[end:].lstrip().removeprefix(CLOSING)
        rest = rest[BETWEEN.match(rest).end() :]  # type: ignore[union-attr]  # it matches nothing, too
    return found


def _call(value: Any, names: frozenset[str]) -> Call | None:
    """The call that a JSON value is; None for none."""
    if not isinstance(value, dict) or not isinstance(value.get(NAME), str) or value[NAME] not in names:
        return None
    if set(value) - {NAME, ARGUMENTS, LLAMAS_ARGUMENTS, "id", "type"}:
        return None
    arguments = value.get(ARGUMENTS, value.get(LLAMAS_ARGUMENTS, {}))
    if isinstance(arguments, str):
        arguments = _loaded(arguments)
    if not isinstance(arguments, dict):
        return None
    return Call(f"call_{secrets.token_hex(12)}", value[NAME], json.dumps(arguments))


def _loaded(text: str) -> Any:
    """JSON within JSON, as some models write it; None for anything else."""
    try:
        return DECODER.decode(text)
    except (ValueError, RecursionError):
        return None


def _refused(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


DECODER = json.JSONDecoder(parse_constant=_refused)
"""Takes no NaN and no infinity."""


def schema_of(tools: Sequence[Tool]) -> dict[str, Any]:
    """The JSON schema of a call of any of these."""
    return {"anyOf": [_schema_of(one.function, f"#/anyOf/{place}/properties/{ARGUMENTS}/") for place, one in enumerate(tools)]}


def _schema_of(function: Function, place: str) -> dict[str, Any]:
    arguments = _moved(function.parameters or {"type": "object"}, place)
    return {
        "type": "object",
        "properties": {NAME: {"const": function.name}, ARGUMENTS: arguments},
        "required": [NAME, ARGUMENTS],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at a place of another one: what it refers to in itself stands there, too."""
    if isinstance(schema, list):
        return [_moved(one, place) for one in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(value, place) for key, value in schema.items()}
    if isinstance(target := moved.get("$ref"), str) and target.startswith("#/"):
        moved["$ref"] = place + target[2:]
    return moved
