"""Tokenizers of GGUF files have the ids and texts of the original; damaged fields are an error."""

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers
from transformers import GemmaTokenizer, LlamaTokenizer
from transformers.tokenization_utils_base import generate_merges

from skipstone.export.gguf.vocabulary import vocabulary_of
from skipstone.hf.detokenizer import Detokenizer, detokenize
from skipstone.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from skipstone.models.gguf.reader import GgufError, GgufFile
from skipstone.models.gguf.tokenizer import gguf_tokenizer, stop_ids
from skipstone.models.mapped_config import UnmappableError
from skipstone.models.unpacked_gguf import load_tokenizer
from tests.helpers.byte_level import CORPUS, RULES, byte_level, plain

TEXTS = [
    *(
        "",
        " ",
        "   ",
        "Hello  world!",
        "a \n\n\n\tb",
        "def f(x):\n    return x\r\n\r\n",
        "don't DON'T 1234567 + 12.5",
        "\x00\x7f",
    ),
    *(
        "é e\u0301 ǅ",
        "你好世界。",
        "مرحبا بالعالم",
        "😀🏽 👩‍👩‍👧‍👦 \u200b\ufeff",
        "\U0001d573\U0001d58a \U0010ffff",
        "a▁b ▁ c",
        "<0x41>",
        "\ufffd",
    ),
    *("<s>a</s> <s>b", "a<table> b\n\n<table><pad> <unk>x", "<think>\nhm </think>", "<s><s>", "x <pad>"),
]
Metadata = dict[str, Any]


def tokenizer_of(metadata: Metadata) -> Any:
    return gguf_tokenizer(SimpleNamespace(metadata=metadata))  # type: ignore[arg-type]


def expect_same(ours: Any, theirs: Any, texts: list[str]) -> None:
    """The same ids and texts. theirs: of transformers."""
    size = len(theirs)
    assert (len(ours), ours.get_vocab()) == (size, theirs.get_vocab())
    assert ours.convert_ids_to_tokens([*range(size)]) == theirs.convert_ids_to_tokens([*range(size)])
    for adds in (True, False):
        ids = ours(texts, add_special_tokens=adds)["input_ids"]
        assert ids == theirs(texts, add_special_tokens=adds)["input_ids"]
        assert ids == [ours(text, add_special_tokens=adds)["input_ids"] for text in texts]
    draw = np.random.default_rng(0)
    for one in (*ids, *(draw.integers(0, size + 2, 12).tolist() for _ in range(50))):
        assert detokenize(ours, one) == detokenize(theirs, one)
        assert streamed(ours, one) == streamed(theirs, one)
        for skips in (True, False):
            assert ours.decode(one, skip_special_tokens=skips) == theirs.decode(one, skip_special_tokens=skips)


def streamed(tokenizer: Any, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, ids[:3], special=True)
    return [*map(detokenizer.add, ids[3:]), detokenizer.rest()]


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_a_byte_level_vocabulary_is_that_of_the_exported_tokenizer(rule: str, begins: bool, tmp_path: Path) -> None:
    theirs = byte_level(rule, begins)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    vocabulary_of(theirs, plain("llama")).write(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    file = GgufFile(tmp_path / "a.gguf")
    for ours in (gguf_tokenizer(file), load_tokenizer(tmp_path / "a.gguf")):
        expect_same(ours, theirs, TEXTS)
        assert ours.special_tokens_map == theirs.special_tokens_map
        assert ours.chat_template == theirs.chat_template
    assert stop_ids(file.metadata) == [1]
    with pytest.raises(TypeError):
        gguf_tokenizer(file)("\ud800")


def byte_level_metadata(**changes: Any) -> Metadata:
    tokens = [b"<s>", b"a", b"b", b"ab", b"<|im_end|>", b"<|end|>", b"[PAD6]"]
    types = np.array([3, 1, 1, 1, 3, 1, 5], np.int32)
    fields = {"model": "gpt2", "pre": "qwen2", "tokens": tokens, "token_type": types, "merges": [b"a b"], "bos_token_id": 0}
    return {f"tokenizer.ggml.{name}": value for name, value in {**fields, **changes}.items() if value is not None}


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_pre_tokenizer_is_built_and_texts_begin_as_llama_cpp_begins_them(name: str) -> None:
    begins = name in ("llama-bpe", "llama3", "llama-v3", "tekken")
    assert tokenizer_of(byte_level_metadata(pre=name))("ab")["input_ids"] == [0] * begins + [3]
    assert tokenizer_of(byte_level_metadata(pre=name, add_bos_token=False))("abb")["input_ids"] == [3, 2]


def test_ids_that_stand_for_no_token_have_none_and_names_may_be_missing() -> None:
    tokenizer = tokenizer_of(byte_level_metadata(add_eos_token=True))
    assert (len(tokenizer), tokenizer.decode([1, 6, 2])) == (6, "ab")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.eos_token_id) == ("<s>", None, None)
    assert tokenizer("a")["input_ids"] == [1]


def test_a_text_ends_at_named_ids_and_at_control_tokens_that_end_a_turn_elsewhere() -> None:
    assert stop_ids(byte_level_metadata()) == [4]
    assert stop_ids(byte_level_metadata(eos_token_id=2, eot_token_id=4, eom_token_id=3)) == [2, 4, 3]


def test_a_file_may_have_several_chat_templates() -> None:
    template, named = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
    assert tokenizer_of(byte_level_metadata()).chat_template is None
    assert tokenizer_of({**byte_level_metadata(), template: "x"}).chat_template == "x"
    assert tokenizer_of({**byte_level_metadata(), template: "x", named: "y"}).chat_template == {"default": "x", "tool_use": "y"}
    with pytest.raises(GgufError, match="a chat template is no text"):
        tokenizer_of({**byte_level_metadata(), template: 3})


@pytest.fixture(scope="module", params=[True, False], ids=["space first", "no space"])
def trained(request: Any) -> Any:
    """A SentencePiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*CORPUS * 3, "你好 ▁ hello  world", "a\n\nb <table>x</table>"]),
        model_writer=model,
        model_type="bpe",
        vocab_size=340,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=request.param,
        user_defined_symbols=["<table>", "\n\n"],
        control_symbols=["<pad>"],
        minloglevel=2,
    )
    return SimpleNamespace(prefix=request.param, model=sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()))


def sentence_piece_metadata(trained: Any, **changes: Any) -> Metadata:
    """The fields of a file, as llama.cpp's converter writes them."""
    model, ids = trained.model, range(trained.model.vocab_size())
    whole = {model.piece_to_id("<table>"), model.piece_to_id("\n\n")}
    kinds = {"2": model.is_unknown, "3": model.is_control, "4": whole.__contains__, "5": model.is_unused, "6": model.is_byte}
    types = [int(next((kind for kind, holds in kinds.items() if holds(number)), "1")) for number in ids]
    fields = {
        **{"model": "llama", "tokens": [model.id_to_piece(number).encode() for number in ids]},
        **{"scores": np.array([model.get_score(number) for number in ids], np.float32)},
        **{"token_type": np.array(types, np.int32), "add_space_prefix": trained.prefix},
        **{"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **changes},
    }
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items() if value is not None}


@given(text=st.one_of(st.text(max_size=30), st.text("aeo  ▁\n\t你😀é'x<", max_size=30)))
@settings(deadline=None)
def test_ids_are_those_of_the_sentencepiece_library(trained: Any, text: str) -> None:
    ours = tokenizer_cache(trained)
    assert (
        ours.backend_tokenizer.decode(trained.model.encode(text), False).encode()
        == trained.model.decode(trained.model.encode(text)).encode()
    )
    if not (trained.prefix and text.startswith("\n\n")):  # a space precedes a whole token only in sentencepiece
        assert ours(text, add_special_tokens=False)["input_ids"] == trained.model.encode(text)


def tokenizer_cache(trained: Any) -> Any:
    """The tokenizer of a trained model, made once."""
    if not hasattr(trained, "tokenizer"):
        trained.tokenizer = tokenizer_of(sentence_piece_metadata(trained))
    return trained.tokenizer


def converted(trained: Any) -> Any:
    """The tokenizer that transformers makes of a SentencePiece model."""
    model = trained.model
    vocab = {model.id_to_piece(number): number for number in range(model.vocab_size())}
    merges = generate_merges(vocab, {token: model.get_score(number) for token, number in vocab.items()})
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": None, "add_bos_token": True}
    made = (LlamaTokenizer if trained.prefix else GemmaTokenizer)(vocab=vocab, merges=merges, mask_token=None, **names)
    made.add_special_tokens({"additional_special_tokens": [AddedToken("<pad>", normalized=False, special=True)]})
    made.add_tokens([AddedToken(text, normalized=False) for text in ("<table>", "\n\n")])
    return made


def test_special_tokens_inside_a_text_are_found_as_transformers_finds_them(trained: Any) -> None:
    texts = [text for text in TEXTS if not text.startswith(" ")]  # transformers adds no space to one, sentencepiece does
    expect_same(tokenizer_cache(trained), converted(trained), texts)
    with pytest.raises(TypeError):
        tokenizer_cache(trained)("\ud800")


def test_phi_3_adds_spaces_everywhere_and_drops_whitespace_after_control_tokens(trained: Any) -> None:
    if not trained.prefix:
        pytest.skip("Phi-3's vocabulary adds spaces")
    theirs = converted(trained)
    theirs.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    theirs.backend_tokenizer.pre_tokenizer = None
    strips = {"normalized": False, "special": True, "rstrip": True}
    theirs.backend_tokenizer.add_special_tokens([AddedToken(text, **strips) for text in ("<pad>", "</s>")])
    ours = tokenizer_of({**sentence_piece_metadata(trained), "general.architecture": "phi3"})
    expect_same(ours, theirs, [*TEXTS, "<pad> \n a</s>\n<pad>\n<table> \n<s> a"])


def test_runs_of_spaces_are_spelled_as_in_the_original_vocabulary(trained: Any) -> None:
    metadata = sentence_piece_metadata(trained)
    tokens = [*metadata["tokenizer.ggml.tokens"], b"   "]
    fields = {"tokens": tokens, "scores": np.zeros(len(tokens), np.float32), "token_type": np.full(len(tokens), 4, np.int32)}
    for name, values in fields.items():
        if name != "tokens":
            values[:-1] = metadata[f"tokenizer.ggml.{name}"]
    ours = tokenizer_of(sentence_piece_metadata(trained, **fields))
    assert ours.convert_ids_to_tokens(len(tokens) - 1) == "▁▁▁"
    assert len(tokens) - 1 in ours("a   b")["input_ids"]
    assert ours.decode(ours("a   b")["input_ids"], skip_special_tokens=True) == "a   b"


def test_empty_tokens_have_names_of_their_own() -> None:
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], b"", b""]
    ours = tokenizer_of(byte_level_metadata(tokens=tokens, token_type=None))
    assert ours.convert_ids_to_tokens([len(tokens) - 2, len(tokens) - 1]) == [f"[EMPTY_{len(tokens) - one}]" for one in (2, 1)]


def test_characters_without_a_token_are_unknown_if_there_are_no_tokens_of_bytes() -> None:
    tokens, types = [b"<unk>", b"a", b"b", b"ab"], np.array([2, 1, 1, 1], np.int32)
    fields = {"model": "llama", "tokens": tokens, "scores": np.arange(4, dtype=np.float32), "token_type": types}
    metadata = {f"tokenizer.ggml.{name}": value for name, value in fields.items()}
    with pytest.raises(UnmappableError, match="without an unknown token"):
        tokenizer_of(metadata)
    ours = tokenizer_of({**metadata, "tokenizer.ggml.unknown_token_id": 0, "tokenizer.ggml.add_space_prefix": False})
    assert ours("abc你b<unk>")["input_ids"] == [3, 0, 2, 0]


LONG = np.zeros(9999, np.float32)
WRONG: list[tuple[Metadata, str]] = [
    ({"tokens": None}, "has no list of tokens"),
    ({"tokens": 3}, "has no list of tokens"),
    ({"tokens": [b"a", b"a"], "scores": LONG[:2], "token_type": None}, "two tokens are the same"),
    ({"tokens": [b"\xff", b"a"], "scores": LONG[:2], "token_type": None}, "a token is no text"),
    ({"token_type": LONG.astype(np.int32)}, "one number for each"),
    ({"token_type": [1, 2]}, "one number for each"),
    ({"scores": LONG}, "one number for each"),
    ({"scores": None}, "has no scores"),
    ({"scores": "x"}, "one number for each"),
    ({"bos_token_id": 1 << 31}, "bos_token_id is 2147483648"),
    ({"unknown_token_id": -1}, "unknown_token_id is -1"),
    ({"eos_token_id": 1.0}, "eos_token_id is 1.0"),
    ({"add_bos_token": np.ones(2)}, "add_bos_token is "),
    ({"add_space_prefix": "no"}, "add_space_prefix is 'no'"),
    ({"model": [b"llama"]}, "model is "),
]


@pytest.mark.parametrize(("changes", "message"), WRONG)
def test_damaged_fields_are_an_error(trained: Any, changes: Metadata, message: str) -> None:
    with pytest.raises(GgufError, match=f"{message}.*fetch the file again"):
        tokenizer_of(sentence_piece_metadata(trained, **changes))


def test_scores_must_be_numbers(trained: Any) -> None:
    scores = sentence_piece_metadata(trained)["tokenizer.ggml.scores"].copy()
    scores[5] = np.nan
    with pytest.raises(GgufError, match="no numbers"):
        tokenizer_of(sentence_piece_metadata(trained, scores=scores))


@pytest.mark.parametrize("merges", [None, [b"a"], [b"a c"], [b"\xff a"], [1], [b"a b c"]])
def test_damaged_merges_are_an_error(merges: Any) -> None:
    with pytest.raises(GgufError, match="merges"):
        tokenizer_of(byte_level_metadata(merges=merges))


def test_what_is_not_known_here_is_left_to_transformers(trained: Any) -> None:
    for changes, reason in (
        ({"model": "bert"}, "of the kind 'bert'"),
        ({"pre": "viking"}, "'viking'"),
        ({"pre": None}, "as ''"),
    ):
        with pytest.raises(UnmappableError, match=reason):
            tokenizer_of(byte_level_metadata(**changes))
    types = sentence_piece_metadata(trained)["tokenizer.ggml.token_type"].copy()
    types[types == 6] = [*[6] * 255, 1]  # a byte is missing
    with pytest.raises(UnmappableError, match="cannot be read"):
        tokenizer_of(sentence_piece_metadata(trained, token_type=types))
