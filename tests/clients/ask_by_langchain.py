"""LangChain's clients of OpenAI's API: python ask_by_langchain.py URL MODEL < requests.json prints the answers."""

import json
import sys

from langchain_openai import ChatOpenAI, OpenAI


def main() -> None:
    url, name = sys.argv[1:]
    asked = json.load(sys.stdin)
    shared = {"base_url": f"{url}/v1", "api_key": "none", "model": name, "temperature": 0, "max_retries": 0}
    text, chat = OpenAI(**shared, max_tokens=asked["new"]), ChatOpenAI(**shared, max_completion_tokens=asked["new"])
    answer = chat.invoke(asked["turns"])
    structured = chat.with_structured_output(asked["schema"], method="json_schema")
    found = {
        "texts": [text.invoke(one) for one in asked["texts"]],
        "streamed_text": list(text.stream(asked["texts"][0])),
        "chat": answer.content,
        "output_tokens": answer.usage_metadata["output_tokens"],
        "streamed_chat": [chunk.content for chunk in chat.stream(asked["turns"])],
        "structured": structured.invoke("how many?"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
