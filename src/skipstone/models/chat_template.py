"""Chat templates: Jinja programs in a checkpoint that write its chats as texts.

They run in the same sandbox and see the same names as in transformers, because they are code that nobody has checked.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from packaging.version import Version

OLDEST_JINJA = "3.1.6"
"""The first version without known ways out of the sandbox."""
REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning. Templates read the first, gpt-oss's reads the second."""


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
    """The text that a template writes for messages of JSON values. variables: what else the template sees.

    Any exception that the template causes; jinja2's TemplateError if it refuses the messages. ImportError if jinja2 is too
    old."""
    return _compiled(template).render(messages=[_with_reasoning(message) for message in messages], **variables)


def _with_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message without fields that are None, and with its reasoning under the names that templates read."""
    fields = {name: value for name, value in message.items() if value is not None}
    reasoning = next((fields[name] for name in REASONING_FIELDS if name in fields), None)
    return fields if reasoning is None else {"thinking": reasoning, **fields, "reasoning_content": reasoning}


@lru_cache(maxsize=8)
def _compiled(template: str) -> jinja2.Template:
    if Version(jinja2.__version__) < Version(OLDEST_JINJA):
        raise ImportError(f"chat templates need jinja2 {OLDEST_JINJA} or newer, found {jinja2.__version__}: update it")
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _now, "dict": _DictMaker()}
    environment.globals["namespace"] = _SafeNamespace
    return environment.from_string(template)


class GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %}, which marks an answer for training. It is a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Macro) -> str:
        return caller()


class _DictMaker:
    """Python's `dict`, of which only calls and `fromkeys` are within reach."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _SafeNamespace(Namespace):
    """jinja2's `namespace` without names that begin with an underscore, which could reach into Python."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # `self` is a name that templates may use
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"chat templates may not store the name {name!r}, which begins with an underscore")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """jinja2's own filter escapes characters for HTML."""
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(format: str) -> str:
    return datetime.now().strftime(format)
