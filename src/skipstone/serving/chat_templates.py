"""How a chat template takes the arguments of earlier calls. Most take an object and write the JSON themselves; some, as
DeepSeek's, concatenate a text. It is tried out once per template, as llama.cpp does it."""

import json
from collections.abc import Sequence
from typing import Any

ARGUMENTS = {"probed_key": "probed_value"}
"""Of the call that is tried out: no template has these words."""
TOOL = {
    "name": "probe",
    "description": "a tool",
    "parameters": {"type": "object", "properties": {"probed_key": {"type": "string"}}, "required": ["probed_key"]},
}
CALL_ID = "probe0000"
"""Mistral's templates take ids of nine letters and digits alone."""


def takes_arguments_as_text(tokenizer: Any) -> bool:
    """Whether a tokenizer's template writes a call's arguments only where they are JSON in a text."""
    return not _writes(tokenizer, ARGUMENTS) and _writes(tokenizer, json.dumps(ARGUMENTS))


def _writes(tokenizer: Any, arguments: Any) -> bool:
    """Whether the arguments of a call stand in what the template writes, and not as Python prints an object."""
    calls = [{"id": CALL_ID, "type": "function", "function": {"name": TOOL["name"], "arguments": arguments}}]
    turns = [
        {"role": "user", "content": "a question"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "an answer", "name": TOOL["name"], "tool_call_id": CALL_ID},
    ]
    for count in (3, 2):  # some templates know no answers of tools
        written = _rendered(tokenizer, turns[:count])
        if written is not None:
            return "probed_value" in written and str(ARGUMENTS) not in written
    return False


def _rendered(tokenizer: Any, turns: Sequence[dict[str, Any]]) -> str | None:
    """What the template writes; None where it fails, which it may do in any way."""
    tools = [{"type": "function", "function": TOOL}]
    try:
        return str(tokenizer.apply_chat_template(list(turns), tools=tools, tokenize=False, add_generation_prompt=True))
    except Exception:
        return None
