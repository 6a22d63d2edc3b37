"""The small tokenizer: nothing is lost, digits and indentation are tokens, the same text gives the same one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, LlamaConfig

from skipstone.train.data.documents import Document
from skipstone.train.data.tokenizer import check_fits, train_bpe

CODE = """def area(width, height):
    if width < 0:
        raise ValueError("negative")
    for row in range(height):
        if row == 12:
            return self.width * 2024
    return width * height
"""
TOKENIZER = train_bpe([CODE] * 20, 400)


def bare(text: str, **options: Any) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False, **options)["input_ids"]


def pieces(text: str) -> list[str]:
    return [TOKENIZER.decode([one]) for one in bare(text)]


@given(st.text() | st.text(" \t\r\n\x0b\u00a0\u3000ab_1é.'<|end|>"))
@example("<|end|>")
@example("a<|end|> b")
@example("  \n\t \r\n 12 ١٢ Ⅷ é e\u0301 \U0001f600\U0001f468\u200d\U0001f469 \x00\ufeff")
@example(" ,")
@example("don 't . , !")  # what clean_up_tokenization_spaces would change
@pytest.mark.slow
def test_nothing_is_lost(text: str) -> None:
    assert TOKENIZER.decode(bare(text)) == text
    assert TOKENIZER.decode(bare(text, split_special_tokens=True)) == text


def test_the_end_is_the_first_entry_and_stands_only_before_a_text() -> None:
    """Between documents it ends one and begins the next, so a text by itself begins with it too."""
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id, TOKENIZER.eos_token) == (0, 0, 0, "<|end|>")
    assert bare("<|end|>") == [0]
    assert 0 not in bare("<|end|>", split_special_tokens=True)
    assert 0 not in bare(CODE)
    assert TOKENIZER(CODE)["input_ids"] == [0, *bare(CODE)]
    assert TOKENIZER("a", "b")["input_ids"] == [0, *bare("a"), *bare("b")]


def test_digits_stand_alone_and_indentation_is_one_token_with_the_line_end_before_it() -> None:
    assert pieces("2024 12") == ["2", "0", "2", "4", " ", "1", "2"]
    assert all(sum(letter.isdigit() for letter in TOKENIZER.decode([one])) <= 1 for one in range(len(TOKENIZER)))
    for depth in (4, 8, 12):
        assert pieces(f"\n{' ' * depth}return")[0] == "\n" + " " * depth
    assert pieces("\n    return width")[1:] == ["return", " width"]


def test_tokens_reach_neither_across_words_nor_from_words_into_punctuation() -> None:
    for one in range(1, len(TOKENIZER)):
        text = TOKENIZER.decode([one])
        letters = {letter.isalnum() or letter == "_" for letter in text.strip()}
        assert len(letters) <= 1 or "\ufffd" in text, text
        assert len(text.split()) <= 1, text


def test_the_same_text_gives_the_same_tokenizer_in_any_order() -> None:
    lines = [line + "\n" for line in CODE.splitlines() for _ in range(3)]
    one = train_bpe(lines, 320).backend_tokenizer.to_str()
    assert train_bpe(lines[::-1], 320).backend_tokenizer.to_str() == one
    assert train_bpe([Document(line, "s", "n") for line in lines], 320).backend_tokenizer.to_str() == one
    assert train_bpe([*lines, "other words"] * 2, 320).backend_tokenizer.to_str() != one
    assert len(train_bpe(lines, 300)) == 300
    assert len(train_bpe(["ab ab"], 5000)) == 258, "the bytes, the end and ab: nothing else occurs twice"


def test_it_is_read_back_as_it_was(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert again.backend_tokenizer.to_str() == TOKENIZER.backend_tokenizer.to_str()
    assert (again.eos_token_id, again.pad_token_id, len(again)) == (0, 0, len(TOKENIZER))
    assert again.clean_up_tokenization_spaces is TOKENIZER.clean_up_tokenization_spaces is False
    text = CODE + " , don 't"
    assert again(text)["input_ids"] == TOKENIZER(text)["input_ids"] == [0, *bare(text)]


def test_no_room_and_no_text_are_refused() -> None:
    with pytest.raises(ValueError, match=r"vocab_size must be at least 257, .* found 256"):
        train_bpe([CODE], 256)
    for nothing in ([], [""]):
        with pytest.raises(ValueError, match="there is no text to train a tokenizer on"):
            train_bpe(nothing, 300)


def test_a_tokenizer_without_an_end_and_ids_out_of_range_are_refused() -> None:
    check_fits(TOKENIZER, LlamaConfig(vocab_size=len(TOKENIZER), eos_token_id=0, pad_token_id=0, bos_token_id=0))
    check_fits(TOKENIZER, LlamaConfig(vocab_size=5000, eos_token_id=[0, 4999]))
    endless = train_bpe([CODE], 257)
    endless.eos_token = None
    with pytest.raises(ValueError, match="the tokenizer has no eos_token, which ends every document"):
        check_fits(endless, LlamaConfig(vocab_size=500))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"vocab_size": 300}, r"ids up to \d+, the model's vocab_size is 300: raise vocab_size"),
        ({"eos_token_id": [0, 700]}, "eos_token_id 700 of the model"),
        ({"pad_token_id": -1}, "pad_token_id -1 of the model"),
    ]
    for config, error in changes:
        text: Any = SimpleNamespace(**{"vocab_size": 500, "eos_token_id": 0, "pad_token_id": None, **config})
        with pytest.raises(ValueError, match=error):
            check_fits(TOKENIZER, SimpleNamespace(get_text_config=lambda text=text: text))  # type: ignore[arg-type]
