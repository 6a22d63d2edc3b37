"""Tokens to text, piece by piece: compared with what the tokenizer decodes the whole to."""

import functools
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import ByT5Tokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

import skipstone
from skipstone import Detokenizer
from skipstone.cli.runs import RunInput, TokenPrinter, decode, run_document
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods import resolve
from skipstone.serving.conversation import Conversation
from tests.helpers import families
from tests.helpers.text_tokenizers import TOKENIZERS

CLEANED = {"wordpiece, clean text", "wordpiece, both clean", "slow wordpiece, clean text"}
BYTE = re.compile(r"<0x..>")
RUNS = [*map(str.encode, "é你😀\n"), b"\xff", b"\xe4", b"\xe4\xbd", b"\xf0\x9f\x98", b"\xff\xe4\xbd\xa0"]
"""Bytes in a row: characters, or no character from the first byte on."""


@functools.cache
def tokenizer_of(name: str) -> Any:
    return skipstone.load(None)[1] if name == "nano" else TOKENIZERS[name]()


@functools.cache
def items(name: str) -> list[list[int]]:
    """What texts are made of: ids, those without a token included; bytes in a row of tokenizers with byte fallback."""
    tokenizer = tokenizer_of(name)
    size = len(tokenizer) if name.startswith("slow") else len(tokenizer) + 3
    written = {token: tokenizer.convert_ids_to_tokens(token) or "" for token in range(size)}
    result = [[token] for token, text in written.items() if not BYTE.fullmatch(text)]
    if len(result) == size:
        return result
    word = tokenizer.convert_tokens_to_ids("b")
    return result + [[word, *tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in run]), word] for run in RUNS] * 5


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> str:
    return "".join(map(detokenizer.add, tokens)) + detokenizer.rest()


@pytest.mark.parametrize("special", [False, True], ids=["", "special"])
@pytest.mark.parametrize("name", ["nano", *TOKENIZERS])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_pieces_are_what_the_tokenizer_decodes_the_whole_to(name: str, special: bool, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    drawn = st.lists(st.sampled_from(items(name)), max_size=40)
    tokens = [token for item in data.draw(drawn) for token in item]
    decoded = functools.partial(tokenizer.decode, skip_special_tokens=not special)
    assert pieces(Detokenizer(tokenizer, special=special), tokens) == decoded(tokens)
    prompt = [token for item in data.draw(drawn) for token in item]
    if name in CLEANED:  # of a boundary that is cleaned up, both sides are said
        prompt += tokenizer.convert_tokens_to_ids(["hello"])
    whole, before = decoded(prompt + tokens), decoded(prompt)
    while not whole.startswith(before):  # the tokens have changed the end, such as the bytes of a character
        before = before[:-1]
    assert pieces(Detokenizer(tokenizer, prompt, special=special), tokens) == whole[len(before) :]


@pytest.mark.parametrize("name", ["nano", "gpt-2", "llama-2", "gemma", "slow bytes"])
@pytest.mark.parametrize("run", [b"\xff", b"\xed\xa1", b"\xe4\xbd", b"\xf0\x9f\x98", b"\x80\xc3"], ids=bytes.hex)
def test_three_bytes_at_most_are_held_back(name: str, run: bytes) -> None:
    """Of bytes that never become a character: the rest is shown while it is written."""
    tokenizer = tokenizer_of(name)
    tokens = bytes_to_tokens(tokenizer, run) * 100
    assert pieces(Detokenizer(tokenizer, tokens), []) == "", "a prompt that ends so is no new text"
    detokenizer, shown = Detokenizer(tokenizer), ""
    for place, token in enumerate(tokens, 1):
        shown += detokenizer.add(token)
        whole = tokenizer.decode(tokens[:place], skip_special_tokens=True)
        assert whole.startswith(shown)
        assert len(whole) - len(shown) <= 3
    assert shown + detokenizer.rest() == tokenizer.decode(tokens, skip_special_tokens=True)


def bytes_to_tokens(tokenizer: Any, run: bytes) -> list[int]:
    if "<0xFF>" in tokenizer.get_vocab():
        return tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in run])
    if isinstance(tokenizer, ByT5Tokenizer):
        return [byte + tokenizer.offset for byte in run]
    return tokenizer.convert_tokens_to_ids([bytes_to_unicode()[byte] for byte in run])


def test_characters_that_were_shown_stay_and_a_prompt_without_text_is_the_beginning_of_a_text() -> None:
    """`tokenizers` takes back all bytes in a row where one of them is none; what a reader has seen stays."""
    tokenizer = tokenizer_of("llama-2")
    tokens = bytes_to_tokens(tokenizer, "é你".encode() + b"\xff\xe4\xbd\xa0")
    assert pieces(Detokenizer(tokenizer), tokens) == "é你" + 4 * "\ufffd"
    assert tokenizer.decode(tokens) == 9 * "\ufffd"
    world, hello = tokenizer.convert_tokens_to_ids(["▁world", "▁Hello"])
    for prompt in ([], [1], [2, 1, 2]):
        assert pieces(Detokenizer(tokenizer, prompt), [world, 1, hello]) == "world Hello"
    assert pieces(Detokenizer(tokenizer, [1, hello, *[2] * 50]), [world, hello]) == " world Hello"


@pytest.mark.parametrize("name", sorted(CLEANED))
def test_words_are_not_held_back_by_a_clean_up(name: str) -> None:
    tokenizer = tokenizer_of(name)
    detokenizer = Detokenizer(tokenizer, tokenizer.convert_tokens_to_ids(["hello"]))
    tokens = tokenizer.convert_tokens_to_ids(["world", ".", "do", "n't", "world"])
    assert [detokenizer.add(token) for token in tokens] == [" world", ".", " do", "n't", " world"]


def test_all_who_write_a_text_behind_a_prompt_write_its_first_space(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer, plain = TOKENIZERS["llama-2"](), resolve("autoregressive")
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    model: Any = families.build("llama", vocab=len(tokenizer), eos_token_id=2)
    words = tokenizer.convert_tokens_to_ids(["▁world", "ld", "▁Hello", "▁."])
    others = [token for token in range(len(tokenizer)) if token not in words]
    options: dict[str, Any] = {"suppress_tokens": others, "max_new_tokens": 6, "do_sample": False}

    def expected(ids: list[int], new: list[int]) -> str:
        whole, before = (tokenizer.decode(tokens, skip_special_tokens=True) for tokens in (ids + new, ids))
        assert whole.startswith(before + " ")
        return whole[len(before) :]

    prompts = ["abab", "babab"]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    output: Any = skipstone.generate(model, prompts, plain, tokenizer=tokenizer, **options)
    assert output.text == [expected(*both) for both in zip(ids, output.new_tokens, strict=True)]

    job = RunInput(model, tokenizer, torch.tensor(ids[:1]), options, 0)
    painter = TokenPrinter(job, color=False)
    run = decode(job, plain, painter.show)
    painter.end()
    text = expected(ids[0], run.tokens)
    assert capsys.readouterr().out == text == run_document(None, job, plain, run, None)["text"]

    talk = Conversation(ModelRunner(model), tokenizer, plain, options, 6)
    request = talk.ask("abab", 0)
    tokens = [token for step in talk.answer(request) for token in step.tokens[0]]
    talk.keep(request, tokens)
    assert talk.messages[-1]["content"] == expected(request.pending.prompt_ids, tokens)
