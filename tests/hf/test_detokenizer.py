"""Tokens to text, piece by piece: compared with what the tokenizer decodes the whole to."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import skipstone
from skipstone import Detokenizer
from tests.helpers.text_tokenizers import TOKENIZERS

CLEANED = {"wordpiece, clean text", "wordpiece, both clean", "slow wordpiece, clean text"}
BYTES_UNKNOWN = {"mixed"}  # its decoder changes what bytes mean
BYTE = re.compile(r"<0x..>")
RUNS = [
    *(text.encode() for text in ("é", "你", "😀", "\n")),
    b"\xff",
    b"\xe4",
    b"\xe4\xbd",
    b"\xf0\x9f\x98",
    b"\xff\xe4\xbd\xa0",
]
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
    found = [[token] for token, text in written.items() if not BYTE.fullmatch(text)]
    if len(found) == size:
        return found
    word = tokenizer.convert_tokens_to_ids("b")
    return found + [[word, *tokenizer.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in run]), word] for run in RUNS] * 5


def pieces(detokenizer: Detokenizer, tokens: list[int]) -> str:
    return "".join(map(detokenizer.add, tokens)) + detokenizer.rest()


@pytest.mark.parametrize("special", [False, True], ids=["", "special"])
@pytest.mark.parametrize("name", ["nano", *TOKENIZERS])
@settings(max_examples=60, deadline=None)
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
