"""Renders chat templates as transformers does, in jinja2's sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which messages hold their reasoning. Templates read the first, or the second."""


def render(
    template: str, messages: Sequence[Mapping[str, Any]], tools: Any, add_generation_prompt: bool, values: Mapping[str, Any]
) -> str:
    """The text of a chat. values: further variables."""
    chat = [_with_reasoning({name: value for name, value in message.items() if value is not None}) for message in messages]
    common = {"documents": None, "add_generation_prompt": add_generation_prompt}
    return _compiled(template).render(messages=chat, tools=tools, **common, **values)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(jinja2.ext.Extension):
    """The tag {% generation %}, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        """Its block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Dict:
    """`dict` without its attributes, which lead out of the sandbox."""

    def __call__(self, *given: Any, **named: Any) -> dict[Any, Any]:
        return dict(*given, **named)

    def fromkeys(self, *given: Any) -> dict[Any, Any]:
        """As of `dict`."""
        return dict.fromkeys(*given)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` without names that lead out of the sandbox."""

    def __init__(*given: Any, **named: Any) -> None:
        own, values = given[0], dict(*given[1:], **named)
        for name in values:
            _refuse_private(name)
        jinja2.utils.Namespace.__init__(own, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"Chat templates cannot store underscore-prefixed attributes, found {name!r}.")


def _raise(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _as_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    extensions = [_Generation, jinja2.ext.loopcontrols]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = _as_json
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda form: datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    return environment.from_string(template)
