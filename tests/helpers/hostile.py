"""Bodies and schemas that nobody sends who means well."""

from collections.abc import Callable
from typing import Any


def nested(depth: int, key: str = "a") -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {key: value}
    return value


def text_of(pattern: str) -> dict[str, Any]:
    """An object with one text that a regular expression describes."""
    return {"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}, "required": ["a"]}


def doubled(depth: int) -> dict[str, Any]:
    """Definitions of which each has the next twice: 2 ** depth of the last one, were they written out."""
    halves = {
        f"d{level}": {
            "type": "object",
            "properties": {side: {"$ref": f"#/$defs/d{level + 1}"} for side in ("left", "right")},
            "required": ["left", "right"],
        }
        for level in range(depth)
    }
    return {"$ref": "#/$defs/d0", "$defs": {**halves, f"d{depth}": {"type": "integer"}}}


def all_of_any_of(width: int, count: int) -> dict[str, Any]:
    """An intersection of unions: width ** count cases, were they written out."""

    def case(name: str) -> dict[str, Any]:
        return {"properties": {name: {"type": "integer"}}, "required": [name]}

    unions = [{"anyOf": [case(f"p{one}_{each}") for each in range(width)]} for one in range(count)]
    return {"type": "object", "allOf": unions}


SCHEMAS: dict[str, Callable[[], dict[str, Any]]] = {
    "nested quantifiers": lambda: text_of("^(a+)+$"),
    "many states": lambda: text_of("^(a|b)*a(a|b){400}$"),
    "counted twice": lambda: text_of("^((.{1,1000}a){1,1000}b){1,1000}$"),
    "a large alternation": lambda: text_of("^(" + "|".join(f"w{n}x*y{n}" for n in range(4000)) + ")*$"),
    "a long text": lambda: {"type": "string", "minLength": 10_000_000},
    "a long list": lambda: {"type": "array", "items": {"type": "integer"}, "minItems": 10_000_000},
    "definitions doubled": lambda: doubled(28),
    "an intersection of unions": lambda: all_of_any_of(8, 12),
    "a definition of itself": lambda: {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    "many properties": lambda: {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(2000)}},
    "nested deeply": lambda: nested(400, "items"),
    "an intersection of patterns": lambda: {"allOf": [text_of(f"^(a|b)*a(a|b){{{n}}}$") for n in range(1, 40)]},
    "many patterns of names": lambda: {
        "type": "object",
        "patternProperties": {f"^p{n}(a|b)*a(a|b){{9}}$": {"type": "integer"} for n in range(800)},
    },
}
REFUSED = {"a definition of itself", "an intersection of unions", "nested deeply"}
REFUSED |= {"an intersection of patterns", "many patterns of names"}
"""Of these, the ones that are answered with 400; the others with a text."""

BIG = "1" + "0" * 30
_DEEP = 900
"""Levels that a parser of JSON takes, and that a function which calls itself may not."""


def _deep(levels: int) -> str:
    return '{"a":' * levels + "{}" + "}" * levels


def _asking_for(schema: str) -> str:
    return f'{{"prompt": "a", "response_format": {{"type": "json_schema", "json_schema": {{"schema": {schema}}}}}}}'


BODIES: dict[str, str] = {
    "no JSON": "{",
    "no object": "[]",
    "null": "null",
    "a token beyond 64 bits": f'{{"prompt": [{BIG}]}}',
    "a token of 64 bits": '{"prompt": [9223372036854775807]}',
    "a huge top_k": f'{{"prompt": "a", "max_tokens": 2, "temperature": 1, "top_k": {BIG}}}',
    "a top_k of 63 bits": '{"prompt": "a", "max_tokens": 2, "temperature": 1, "top_k": 9223372036854775807}',
    "a huge length": f'{{"prompt": "a", "max_tokens": {BIG}}}',
    "a tiny temperature": '{"prompt": "a", "max_tokens": 2, "temperature": 1e-320}',
    "a tiny top_p": '{"prompt": "a", "max_tokens": 2, "temperature": 1, "top_p": 1e-320}',
    "not a number": '{"prompt": "a", "temperature": NaN}',
    "infinity": '{"prompt": "a", "temperature": 1e999}',
    "a NUL": '{"prompt": "\\u0000", "max_tokens": 2, "stop": "\\u0000"}',
    "nested too deeply for a parser": _deep(100_000),
    "a deep method": f'{{"prompt": "a", "speculative": {_deep(_DEEP)}}}',
    "a deep schema": _asking_for(_deep(_DEEP)),
    "settings of no kind": '{"prompt": "a", "speculative": {"method": ["auto"]}}',
    "a method without a name": '{"prompt": "a", "speculative": {}}',
    "a huge setting": f'{{"prompt": "a", "speculative": {{"method": "layerskip", "exit_layer": {BIG}}}}}',
    "a long draft": '{"prompt": "a", "max_tokens": 2, "speculative": "prompt_lookup num_speculative_tokens=1000000"}',
    "an unclosed quote": '{"prompt": "a", "speculative": "auto candidates=\'"}',
}
"""Bodies of /v1/completions, as they go over the wire, by what is wrong with them."""
TAKEN = {"a top_k of 63 bits", "a tiny temperature", "a tiny top_p", "a NUL", "a method without a name"}
"""Of these, the ones that are strange and yet right: they are answered with a text, the others with 400."""
