"""A small tokenizer for a small model: byte-level byte-pair encoding with single digits and indentation as tokens."""

from collections.abc import Iterable
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from skipstone.train.data.documents import Document

END = "<|end|>"  # stands between documents, so it begins a text as well as ending one, and pads a batch; id 0
BYTES = 256  # entries of the vocabulary that are single bytes

PIECES = (
    r"(?:[ \t]*\r?\n)+[ \t]*"  # the ends of lines with the indentation that follows
    r"| ?[\p{L}_][\p{L}\p{M}_]*"  # a word or name, with the space before it
    r"| ?[^\s\p{L}\p{N}_]+"  # punctuation
    r"|\p{N}"  # one digit
    r"|\s+(?!\S)|\s+"  # other whitespace, but for a last space that belongs to what follows
)
"""What a token may not reach across."""


def train_bpe(documents: Iterable[Document | str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A tokenizer with at most `vocab_size` entries (fewer where nothing is left to merge), the same for the same text.

    Every byte is an entry, so that whatever UTF-8 can hold comes back from its tokens. <|end|> is id 0, the end of a document
    (eos), what a text begins with (bos), and the padding. ValueError for a vocabulary without room for the bytes, and for no
    text.
    """
    if vocab_size <= BYTES:
        raise ValueError(f"vocab_size must be at least {BYTES + 1}, for every byte and {END}, found {vocab_size}")
    texts = [document if isinstance(document, str) else document.text for document in documents]
    if not any(texts):
        raise ValueError("there is no text to train a tokenizer on: expected at least one document that is not empty")
    tokenizer = Tokenizer(models.BPE())
    pieces = pre_tokenizers.Split(Regex(PIECES), behavior="isolated")
    in_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pieces, in_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    known: dict[str, Any] = {"special_tokens": [END], "initial_alphabet": sorted(in_bytes.alphabet())}
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, min_frequency=2, show_progress=False, **known)
    tokenizer.train_from_iterator(texts, trainer)
    end = tokenizer.token_to_id(END)
    tokenizer.post_processor = TemplateProcessing(single=f"{END} $A", pair=f"{END} $A $B", special_tokens=[(END, end)])
    own = {"bos_token": END, "eos_token": END, "pad_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **own, clean_up_tokenization_spaces=False)


def check_fits(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> None:
    """ValueError where a tokenizer can give ids that the model has no embedding for, or has no end of a document."""
    text = config.get_text_config()
    size: int = text.vocab_size
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= size:
        raise ValueError(f"the tokenizer gives ids up to {largest}, the model's vocab_size is {size}: raise vocab_size")
    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no eos_token, which ends every document: set tokenizer.eos_token")
    for kind, owner in (("tokenizer", tokenizer), ("model", text)):
        for name in ("eos_token_id", "pad_token_id"):
            value: Any = getattr(owner, name, None)
            for one in value if isinstance(value, list | tuple) else [value]:
                if one is not None and not 0 <= one < size:
                    raise ValueError(f"{name} {one} of the {kind} lies outside its vocabulary: expected 0 to {size - 1}")
