"""Answers of a model whose tokenizer writes spaces by SentencePiece's rules, and the bytes of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import AddedToken

from skipstone.serving.logprobs import TokenReader
from skipstone.serving.output_text import OutputText
from tests.helpers import families
from tests.helpers.served import InThread, in_thread
from tests.helpers.text_tokenizers import TOKENIZERS

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.fixture(scope="module")
def pieces() -> Any:
    made = TOKENIZERS["llama-2"]()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def server(pieces: Any) -> Iterator[InThread]:
    model = families.build("llama", vocab=len(pieces), eos_token_id=2)
    with in_thread(lambda: (model, pieces), max_num_seqs=4, max_waiting=16, drain_seconds=5) as running:
        yield running


@pytest.fixture
def worlds(pieces: Any) -> dict[str, Any]:
    """A body whose answer is " world" in each of three tokens."""
    token = pieces.convert_tokens_to_ids("▁world")
    return {"max_tokens": 3, "temperature": 0, "logit_bias": {str(token): 100}}


def streamed(server: InThread, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    lines = server.http.post(path, json={**body, "stream": True}).text.splitlines()
    return [choice for line in lines if line.startswith("data: {") for choice in json.loads(line[5:])["choices"]]


def test_a_completion_keeps_its_first_space(server: InThread, worlds: dict[str, Any]) -> None:
    body = {"prompt": "Hello", **worlds}
    for more, begin in (({}, ""), ({"echo": True}, "Hello"), ({"echo": True, "logprobs": 1}, "Hello")):
        for count in (1, 2):
            asked = {**body, **more, "n": count}
            choices = server.http.post("/v1/completions", json=asked).json()["choices"]
            assert [one["text"] for one in choices] == [begin + " world world world"] * count
            chunks = streamed(server, "/v1/completions", asked)
            for index in range(count):
                assert "".join(one["text"] for one in chunks if one["index"] == index) == begin + " world world world"


def test_the_first_word_of_all_has_no_space(server: InThread, worlds: dict[str, Any]) -> None:
    asked = {"prompt": [1], **worlds}  # nothing but the beginning of a text
    assert server.http.post("/v1/completions", json=asked).json()["choices"][0]["text"] == "world world world"


def test_a_chat_keeps_its_first_space_and_tells_it(server: InThread, worlds: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], **worlds, "logprobs": True, "top_logprobs": 3}
    choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"] == " world world world"
    assert "".join(one["delta"].get("content") or "" for one in streamed(server, "/v1/chat/completions", body)) == (
        " world world world"
    )
    for one in choice["logprobs"]["content"]:
        assert (one["token"], one["bytes"]) == (" world", list(b" world"))
        for other in one["top_logprobs"]:
            assert bytes(other["bytes"]).decode(errors="replace") == other["token"]


def test_a_stop_string_that_begins_with_a_space_is_found_at_once(server: InThread, worlds: dict[str, Any]) -> None:
    for stop, text, tokens in ((" world", "", 1), ("d w", " worl", 2)):
        answer = server.http.post("/v1/completions", json={"prompt": "Hello", **worlds, "stop": [stop]}).json()
        assert answer["choices"][0]["text"] == text
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == tokens


def test_tokens_of_a_completion_are_told_with_their_spaces(server: InThread, pieces: Any, worlds: dict[str, Any]) -> None:
    body = {"prompt": pieces.convert_tokens_to_ids(["<s>", "Hello"]), **worlds, "logprobs": 2}
    told = server.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert told["tokens"] == [" world"] * 3
    assert told["text_offset"] == [0, 6, 12]
    echoed = server.http.post("/v1/completions", json={**body, "echo": True}).json()["choices"][0]["logprobs"]
    assert echoed["tokens"] == ["<s>", "Hello", " world", " world", " world"]
    assert echoed["text_offset"] == [0, 0, 5, 11, 17]


# -------------------------------------------------------------------------------------------------- bytes of tokens


@pytest.mark.parametrize("name", ["gpt-2", "llama-3", "codegen", "added", "llama-2", "gemma"])
def test_bytes_of_all_tokens_are_those_of_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = "Hello world! é 你好 😀, a b\n"
    ids = tokenizer(text)["input_ids"]
    reader, found = TokenReader(tokenizer), b""
    for token in ids:
        again = reader.entry(token, -1.0)
        found += bytes(again["bytes"])
        assert again["bytes"] == reader.entry(token, -1.0)["bytes"]
        reader.add(token)
    assert found == tokenizer.decode(ids, skip_special_tokens=True).encode()
    assert found.strip() == text.encode().strip()
    assert any("\ufffd" in reader.text(token) for token in ids)


def test_bytes_of_parts_of_characters_by_http(server: InThread, pieces: Any) -> None:
    token = pieces.convert_tokens_to_ids("<0xE4>")
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0, "logprobs": True}
    body |= {"top_logprobs": 20, "logit_bias": {str(token): 100}}
    choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert [one["bytes"] for one in choice["logprobs"]["content"]] == [[0xE4]] * 2
    assert choice["message"]["content"] == "\ufffd" * 2
    others = [other for one in choice["logprobs"]["content"] for other in one["top_logprobs"]]
    parts = [other["bytes"] for other in others if other["token"] == "\ufffd"]
    assert len(parts) > 5
    assert all(len(part) == 1 and part[0] >= 0x80 for part in parts)


def test_a_token_that_is_no_text_has_a_name_and_no_bytes() -> None:
    tokenizer = TOKENIZERS["llama-2"]()
    world = tokenizer.convert_tokens_to_ids("▁world")
    reader = TokenReader(tokenizer, [1], frozenset({world}))
    assert reader.entry(2, -1.0) == {"token": "</s>", "logprob": -1.0, "bytes": []}
    assert reader.entry(world, -1.0)["bytes"] == []
    assert (reader.add(world), reader.add(2), reader.add(world)) == (0, 0, 0)


def test_python_tokenizers_do_not_tell_parts_of_characters() -> None:
    tokenizer = TOKENIZERS["slow bytes"]()
    tokenizer.add_tokens([AddedToken("word", special=False)])
    reader = TokenReader(tokenizer)
    assert reader.entry(tokenizer.convert_tokens_to_ids("a"), -1.0)["bytes"] == [97]


@pytest.mark.parametrize("name", ["llama-2", "unigram", "wordpiece", "suffixes", "slow wordpiece, clean text"])
def test_a_stop_string_ends_a_text_wherever_its_tokens_are_cut(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    words = ["▁Hello", "▁world", "!"] if name in ("llama-2", "unigram") else ["hello</w>", "wor", "ld</w>"]
    words = words if name != "wordpiece" and "slow" not in name else ["hello", "world", "!"]
    prompt, *new = tokenizer.convert_tokens_to_ids([words[0], *words])
    whole = tokenizer.decode([prompt, *new])
    text = whole[len(tokenizer.decode([prompt])) :]
    for place in range(len(text)):
        for size in (1, 2, 5):
            stop = text[place : place + size]
            writer = OutputText(tokenizer, [stop], prompt=[prompt])
            written = writer.add(new) + writer.rest()
            assert (written, writer.stopped) == (text[: text.find(stop)], True)
