"""Stop strings against transformers' own criterion, on tokenizers of every kind."""

import random
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

import skipstone
from skipstone.assets import NANO
from skipstone.decoding.stop_strings import StopStrings
from tests.helpers import families, text_tokenizers
from tests.helpers.support import tokenizer


def wordpiece() -> Any:
    """transformers' criterion needs a vocabulary that can write "abcdef"."""
    words = ["[UNK]", "[CLS]", "abc", "##def", "abcdef", "the", "a", "##a", "##b", "b", "stop", "##stop", ".", "don", "'", "t"]
    core = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", cls_token="[CLS]")


KINDS = ("llama-2", "added", "mixed", "gemma")
TOKENIZERS: dict[str, Any] = {
    "nano": lambda: AutoTokenizer.from_pretrained(NANO),
    "letters": tokenizer,
    "wordpiece": wordpiece,
    **{kind: text_tokenizers.TOKENIZERS[kind] for kind in KINDS},
}


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_they_end_a_text_where_transformers_does(kind: str) -> None:
    words, dice = TOKENIZERS[kind](), random.Random(kind)
    size = min(len(words), 300)
    ended = 0
    for _ in range(15):
        ids = [dice.randrange(size - 12 if dice.random() < 0.8 else 0, size) for _ in range(30)]
        pieces = [piece for piece in words.decode(ids).split("\ufffd") if piece]
        piece = max(pieces, key=len)
        begin = dice.randrange(len(piece))
        strings = [piece[begin : begin + dice.randrange(1, 6)], "never met"]
        expected, prompt = StopStringCriteria(words, strings), torch.tensor(ids[:4])
        ours = StopStrings(strings, words)
        for count in range(5, len(ids) + 1):
            there = bool(expected(torch.tensor([ids[:count]]), None))
            assert ours.completed_by_last(prompt, ids[4:count]) == there, (strings, ids[:count])
            ended += there
    assert ended > 5


def test_a_character_over_several_tokens_counts() -> None:
    words = AutoTokenizer.from_pretrained(NANO)
    ids = words("x🙂y", add_special_tokens=False)["input_ids"]
    assert len(ids) > 3, "the character has more than one token"
    ours, prompt = StopStrings(["🙂"], words), torch.tensor([1])
    met = [ours.completed_by_last(prompt, ids[:count]) for count in range(1, len(ids) + 1)]
    assert met.count(True) == 1
    assert "🙂" in words.decode(ids[: met.index(True) + 1])


def test_no_call_walks_over_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    words, count = text_tokenizers.llama(), 12
    model, converted, walks = families.build("llama", vocab=len(words)), [], []
    convert, vocabulary = words.convert_tokens_to_string, words.get_vocab
    monkeypatch.setattr(words, "convert_tokens_to_string", lambda tokens: converted.append(tokens) or convert(tokens))
    monkeypatch.setattr(words, "get_vocab", lambda: walks.append(1) or vocabulary())
    options: dict[str, Any] = {"tokenizer": words, "stop_strings": ["never met"], "max_new_tokens": count}
    found: Any = skipstone.generate(model, torch.tensor([[260, 261]]), "autoregressive", eos_token_id=None, **options)
    assert len(found.new_tokens[0]) == count
    assert not walks
    assert len(converted) <= count, "one conversion for each written token at most"


def test_a_token_that_only_looks_like_a_byte_is_text() -> None:
    words = text_tokenizers.llama()
    words.add_tokens(["<0xZZ>"])
    assert StopStrings(["0xZ"], words).completed_by_last(torch.tensor([1]), [len(words) - 1])
    assert not StopStrings(["a"], words).completed_by_last(torch.tensor([3]), [len(words) + 5]), "an unknown id is no text"
