"""LiteLLM against a server that speaks OpenAI's API: python ask_by_litellm.py URL MODEL < requests.json prints the answers."""

import json
import sys
from typing import Any

import litellm


def streamed_call(chunks: Any, turns: list[dict[str, str]]) -> dict[str, Any]:
    return litellm.stream_chunk_builder(list(chunks), messages=turns).choices[0].message.tool_calls[0].function.model_dump()


def main() -> None:
    url, name = sys.argv[1:]
    asked = json.load(sys.stdin)
    turns, new = asked["turns"], asked["new"]
    shared = {"api_base": f"{url}/v1", "api_key": "none", "temperature": 0, "num_retries": 0}
    chat = {**shared, "model": f"openai/{name}", "messages": turns}
    text = {**shared, "model": f"text-completion-openai/{name}", "prompt": asked["text"], "max_tokens": new}
    calling = {**chat, "max_tokens": 200, "tools": [{"type": "function", "function": asked["tool"]}], "tool_choice": "required"}
    form = {"type": "json_schema", "json_schema": {"name": "thing", "schema": asked["schema"], "strict": True}}
    answer = litellm.completion(**chat, max_tokens=new, extra_body={"speculative": "prompt_lookup", "return_metrics": True})
    chunks = list(litellm.completion(**chat, max_tokens=new, stream=True, stream_options={"include_usage": True}))
    try:
        litellm.completion(**chat, max_tokens=0)
        refused = None
    except litellm.exceptions.BadRequestError as error:
        refused = [type(error).__name__, error.status_code, str(error)]
    found = {
        "text": litellm.text_completion(**text).choices[0].text,
        "streamed_text": [chunk.choices[0].text or "" for chunk in litellm.text_completion(**text, stream=True)],
        "chat": answer.choices[0].message.content,
        "usage": answer.usage.model_dump(),
        "metrics": answer.model_dump().get("metrics"),
        "streamed_chat": [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices],
        "streamed_usage": chunks[-1].usage.model_dump(),
        "call": litellm.completion(**calling).choices[0].message.tool_calls[0].function.model_dump(),
        "streamed_call": streamed_call(litellm.completion(**calling, stream=True), turns),
        "structured": litellm.completion(**chat, max_tokens=100, response_format=form).choices[0].message.content,
        "refused": refused,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
