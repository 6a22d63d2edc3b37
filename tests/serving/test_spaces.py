"""Tokens to text: spaces by SentencePiece's rules, bytes of tokens, and what stop strings leave of an answer."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
    token = pieces.convert_tokens_to_ids("▁world")
    return {"max_tokens": 3, "temperature": 0, "logit_bias": {str(token): 100}}


def test_a_completion_keeps_its_first_space(server: InThread, worlds: dict[str, Any]) -> None:
    for more, begin in (({}, ""), ({"echo": True, "n": 2}, "Hello"), ({"echo": True, "logprobs": 1}, "Hello")):
        body = {"prompt": "Hello", **worlds, **more}
        choices = server.http.post("/v1/completions", json=body).json()["choices"]
        assert [one["text"] for one in choices] == [begin + " world world world"] * more.get("n", 1)
        chunks = server.choices(body, "/v1/completions")
        for choice in choices:
            own = [one["text"] for one in chunks if one["index"] == choice["index"]]
            assert "".join(own) == choice["text"]
    first = {"prompt": [1], **worlds}  # nothing but the beginning of a text
    assert server.http.post("/v1/completions", json=first).json()["choices"][0]["text"] == "world world world"


def test_a_chat_keeps_its_first_space_and_tells_it(server: InThread, worlds: dict[str, Any]) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], **worlds, "logprobs": True, "top_logprobs": 3}
    choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert choice["message"]["content"] == " world world world"
    assert "".join(one["delta"].get("content") or "" for one in server.choices(body, "/v1/chat/completions")) == (
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
    info = server.http.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert info["tokens"] == [" world"] * 3
    assert info["text_offset"] == [0, 6, 12]
    echoed = server.http.post("/v1/completions", json={**body, "echo": True}).json()["choices"][0]["logprobs"]
    assert echoed["tokens"] == ["<s>", "Hello", " world", " world", " world"]
    assert echoed["text_offset"] == [0, 0, 5, 11, 17]


@pytest.mark.parametrize("name", ["gpt-2", "llama-3", "codegen", "added", "llama-2", "gemma"])
def test_bytes_of_all_tokens_are_those_of_the_text(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    text = "Hello world! é 你好 😀, a b\n"
    ids = tokenizer(text)["input_ids"]
    reader, result = TokenReader(tokenizer), b""
    for token in ids:
        result += bytes(reader.entry(token, -1.0)["bytes"])
        reader.add(token)
    assert result == tokenizer.decode(ids, skip_special_tokens=True).encode()
    assert result.strip() == text.encode().strip()
    assert any("\ufffd" in reader.text(token) for token in ids)


def test_a_token_that_is_no_text_has_a_name_and_no_bytes() -> None:
    tokenizer = TOKENIZERS["llama-2"]()
    world = tokenizer.convert_tokens_to_ids("▁world")
    reader = TokenReader(tokenizer, [1], frozenset({world}))
    assert reader.entry(2, -1.0) == {"token": "</s>", "logprob": -1.0, "bytes": []}
    assert reader.entry(world, -1.0)["bytes"] == []
    assert (reader.add(world), reader.add(2), reader.add(world)) == (0, 0, 0)
    slow = TOKENIZERS["slow bytes"]()
    slow.add_tokens([AddedToken("word", special=False)])
    assert TokenReader(slow).entry(slow.convert_tokens_to_ids("a"), -1.0)["bytes"] == [97]


def test_bytes_of_parts_of_characters_by_http(server: InThread, pieces: Any) -> None:
    token = pieces.convert_tokens_to_ids("<0xE4>")
    body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2, "temperature": 0, "logprobs": True}
    body |= {"top_logprobs": 20, "logit_bias": {str(token): 100}}
    choice = server.http.post("/v1/chat/completions", json=body).json()["choices"][0]
    content = choice["logprobs"]["content"]
    assert [one["bytes"] for one in content] == [[0xE4]] * 2
    assert choice["message"]["content"] == "\ufffd" * 2
    parts = [other["bytes"] for one in content for other in one["top_logprobs"] if other["token"] == "\ufffd"]
    assert len(parts) > 5
    assert all(len(part) == 1 and part[0] >= 0x80 for part in parts)


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


class Letters:
    """A tokenizer whose tokens are characters; a code above 1000 is half of one: two in a row are the character."""

    def decode(self, tokens: list[int], **_: object) -> str:
        text, place = "", 0
        while place < len(tokens):
            if tokens[place] >= 1000:
                whole = place + 1 < len(tokens)
                text += chr(tokens[place] - 1000) if whole else "�"
                place += 2
            else:
                text += chr(tokens[place])
                place += 1
        return text


letters = st.text("abc", max_size=30)


@given(letters, st.lists(st.text("abc", min_size=1, max_size=4), max_size=3), st.lists(st.integers(1, 5), min_size=30))
def test_a_text_ends_before_the_first_stop_string_however_it_comes_in(text: str, stops: list[str], sizes: list[int]) -> None:
    """Exact whatever the sizes of the pieces: nothing of a stop string is ever sent, nothing else is lost."""
    writer, tokens, sent = OutputText(Letters(), stops), [*map(ord, text)], ""
    for size in sizes:
        sent += writer.add(tokens[:size])
        tokens = tokens[size:]
    sent += writer.rest()
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (sent, writer.stopped, writer.count) == (text, False, len(text))
        return
    first = min(ends)  # the tokens up to here complete a stop string, and none before
    assert writer.stopped
    assert writer.count == first
    assert sent == text[: min(text[:first].find(stop) for stop in stops if stop in text[:first])]
    assert sent == writer.text


def test_what_may_become_a_character_or_a_stop_string_waits_and_an_end_of_text_is_no_text() -> None:
    writer = OutputText(Letters(), [])
    assert writer.add([ord("a"), 1000 + 0x1F600]) == "a"
    assert writer.add([1000 + 0x1F600]) == "\U0001f600"
    writer = OutputText(Letters(), ["stop"])
    assert [writer.add([*map(ord, text)]) for text in ("do st", "a", "sto")] == ["do ", "sta", ""]
    assert (writer.rest(), writer.stopped) == ("sto", False)
    writer = OutputText(Letters(), [], frozenset({7}))
    assert writer.add([*map(ord, "ab"), 7]) == "ab"
    assert writer.count == 3
