"""Small tokenizers of every way to write texts as tokens, made without a download."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import ByT5Tokenizer, CodeGenTokenizer, CTRLTokenizer, PreTrainedTokenizerFast
from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

from tests.helpers.byte_level import byte_level

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
PIECES = [
    *("▁", "▁▁", "▁Hello", "Hello", "▁world", "wor", "ld", "!", ".", "▁.", ",", "▁a", "a", "b", "\n", "▁你", "好", "�"),
    *("▁stop", "stop", "▁x", "é"),
]
WORDS = [
    *("[UNK]", "[PAD]", "hello", "world", "##lo", "##s", ".", ",", "!", "?", "'", "n", "##'", "##t", "t", "n't", "m", "s"),
    *("ve", "re", "##'t", "##ve", "'s", "do", "##n", "你", "��"),
]


def _wrapped(core: Tokenizer, **fields: Any) -> PreTrainedTokenizerFast:
    core.add_tokens([AddedToken("<think>", special=False, normalized=False), AddedToken("ü ber", special=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, **fields)


def _pieces(decoder: Any) -> PreTrainedTokenizerFast:
    vocabulary = {word: number for number, word in enumerate([*SPECIAL, *BYTES, *PIECES])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoder
    return _wrapped(core, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>")


def llama() -> PreTrainedTokenizerFast:
    """As Llama 2 and Mistral 7B."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _pieces(decoders.Sequence(steps))


def gemma() -> PreTrainedTokenizerFast:
    """Without the rule that drops the first space."""
    return _pieces(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def unigram() -> PreTrainedTokenizerFast:
    """As T5 and XLNet."""
    core = Tokenizer(models.Unigram([(word, -float(number)) for number, word in enumerate([*SPECIAL, *PIECES])], unk_id=0))
    core.pre_tokenizer, core.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return _wrapped(core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def word_piece(own: bool, whole: bool) -> PreTrainedTokenizerFast:
    """As BERT. own: whether the decoder cleans up every token. whole: whether transformers cleans up the text."""
    core = Tokenizer(models.WordPiece({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer, core.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(cleanup=own)
    return _wrapped(core, unk_token="[UNK]", pad_token="[PAD]", clean_up_tokenization_spaces=whole)


def words() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    return _wrapped(core, unk_token="[UNK]", pad_token="[PAD]", clean_up_tokenization_spaces=False)


def suffixes() -> PreTrainedTokenizerFast:
    """As the first GPT: the end of a word is marked."""
    marked = ["<unk>", "hel", "lo</w>", "hello</w>", "wor", "ld</w>", ".</w>", ","]
    core = Tokenizer(models.BPE({word: number for number, word in enumerate(marked)}, [], end_of_word_suffix="</w>"))
    core.decoder = decoders.BPEDecoder(suffix="</w>")
    return _wrapped(core, unk_token="<unk>")


def mixed() -> PreTrainedTokenizerFast:
    """Bytes, and a rule of its own behind them."""
    made = byte_level("gpt-2")
    made.backend_tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("the", "THE")])
    return made


def added() -> PreTrainedTokenizerFast:
    """Bytes, with tokens that were added later."""
    made = byte_level("llama-bpe")
    made.add_tokens(["ünï", "two words", "你好"])
    made.add_special_tokens({"additional_special_tokens": ["<|sonder|>", "é spécial"]})
    return made


def slow_words(whole: bool) -> Any:
    """BERT's in Python."""
    with TemporaryDirectory() as folder:
        file = Path(folder, "vocab.txt")
        file.write_text("\n".join([*WORDS, "[CLS]", "[SEP]", "[MASK]"]), encoding="utf-8")
        return BertTokenizerLegacy(str(file), clean_up_tokenization_spaces=whole)


def slow_marks() -> Any:
    """CTRL's in Python: a token that is no word's end is marked."""
    with TemporaryDirectory() as folder:
        Path(folder, "vocab.json").write_text('{"<unk>": 0, "he@@": 1, "llo": 2, "wor@@": 3, "ld": 4, "a": 5}')
        Path(folder, "merges.txt").write_text("#version: 0.2\n")
        return CTRLTokenizer(str(Path(folder, "vocab.json")), str(Path(folder, "merges.txt")))


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "gpt-2": lambda: byte_level("gpt-2"),
    "llama-3": lambda: byte_level("llama-bpe", begins=True),
    "codegen": lambda: CodeGenTokenizer(tokenizer_object=byte_level("gpt-2").backend_tokenizer),
    "added": added,
    "llama-2": llama,
    "gemma": gemma,
    "unigram": unigram,
    "wordpiece": lambda: word_piece(own=False, whole=False),
    "wordpiece, clean tokens": lambda: word_piece(own=True, whole=False),
    "wordpiece, clean text": lambda: word_piece(own=False, whole=True),
    "wordpiece, both clean": lambda: word_piece(own=True, whole=True),
    "wordlevel": words,
    "suffixes": suffixes,
    "mixed": mixed,
    "slow wordpiece": lambda: slow_words(whole=False),
    "slow wordpiece, clean text": lambda: slow_words(whole=True),
    "slow marks": slow_marks,
    "slow bytes": ByT5Tokenizer,
}
