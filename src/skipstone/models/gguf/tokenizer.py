"""The tokenizer of a GGUF file, with the ids of the checkpoint's own tokenizer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from skipstone.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from skipstone.models.gguf.reader import GgufError, GgufFile
from skipstone.models.gguf.sentence_piece import SPACE, SentencePieceBackend, TokenType
from skipstone.models.mapped_config import UnmappableError
from skipstone.models.tokenizer import CheckpointTokenizer

PREFIX, TEMPLATE = "tokenizer.ggml.", "tokenizer.chat_template"
KEYS = {
    **{f"{name}_token": f"{name}_token_id" for name in ("bos", "eos", "cls", "mask")},
    **{"unk_token": "unknown_token_id", "pad_token": "padding_token_id", "sep_token": "seperator_token_id"},
}
"""Name of a special token -> its key, which the format spells like this."""
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Keys of tokens that end a text, a turn or a message."""
END_TEXTS = {
    *(b"<|eot_id|>", b"<|eom_id|>", b"<|im_end|>", b"<|end|>", b"<end_of_turn>", b"<|endoftext|>", b"<|end_of_text|>"),
    *(b"</s>", b"<EOT>", b"[EOS]"),
}
"""Control tokens that end a turn in every model that has them."""
PHI3_KEEPS_SPACES = ("<unk>", "<s>", "<|endoftext|>")
"""Whitespace after these control tokens of Phi-3 is text."""


@dataclass(frozen=True)
class _Vocabulary:
    """tokens: by id. types: of every token, int32 [tokens]. special: name -> id. before, after: ids around a text."""

    tokens: list[str]
    types: np.ndarray
    special: dict[str, int]
    before: list[int]
    after: list[int]


def gguf_tokenizer(file: GgufFile) -> CheckpointTokenizer:
    """The tokenizer of a file. UnmappableError for a kind that is not known here, GgufError for damaged fields."""
    kind, name = (_value(file.metadata, key, "") for key in ("model", "pre"))
    if kind not in ("gpt2", "llama"):
        raise UnmappableError(f"has a tokenizer of the kind {kind!r}")
    if kind == "gpt2" and name not in PRE_TOKENIZERS:
        raise UnmappableError(f"has a tokenizer that cuts texts into words as {name!r}")
    begins = kind == "llama" or PRE_TOKENIZERS[name].adds_bos
    vocabulary = _vocabulary(file.metadata, begins)
    backend: Any = (_sentence_piece if kind == "llama" else _byte_level)(file.metadata, vocabulary)
    special = {name: backend.id_to_token(number) for name, number in vocabulary.special.items()}
    return CheckpointTokenizer(backend, special, chat_template=_chat_template(file.metadata))


def stop_ids(metadata: Mapping[str, Any]) -> list[int]:
    """The ids that end a generated text.

    The file names at most three. Many files name only the end of the text, and then a chat would go on. So control tokens with
    a text of END_TEXTS end it as well. llama.cpp does the same with further texts."""
    tokens = _tokens(metadata)
    named = [_id(metadata, key, len(tokens)) for key in ENDS]
    control = np.flatnonzero(_types(metadata, len(tokens)) == TokenType.CONTROL).tolist()
    return [*dict.fromkeys([*(one for one in named if one is not None), *(one for one in control if tokens[one] in END_TEXTS)])]


def _vocabulary(metadata: Mapping[str, Any], begins: bool) -> _Vocabulary:
    """begins: whether texts begin with BOS if the file does not say."""
    written = _tokens(metadata)
    types = _types(metadata, len(written))
    while written and types[len(written) - 1] == TokenType.UNUSED and written[-1] == b"[PAD%d]" % (len(written) - 1):
        written = written[:-1]  # converters name ids without a token so
    try:
        tokens = [token.decode() or f"[EMPTY_{number}]" for number, token in enumerate(written)]  # as llama.cpp
    except UnicodeDecodeError as error:
        raise _damaged(f"a token is no text: {error}") from error
    if len(set(tokens)) < len(tokens):
        raise _damaged("two tokens are the same")
    special = {name: _id(metadata, key, len(tokens)) for name, key in KEYS.items()}
    special = {name: number for name, number in special.items() if number is not None}
    around = [
        [special[name] for name in (f"{end}_token",) if name in special and _value(metadata, f"add_{end}_token", default)]
        for end, default in (("bos", begins), ("eos", False))
    ]
    return _Vocabulary(tokens, types[: len(tokens)], special, *around)


def _sentence_piece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> SentencePieceBackend:
    """Llama's own tokenizer adds a space at the beginning of a text alone, and so do we. llama.cpp adds one after every control
    token as well, and finds no user-defined run of spaces that a text spells with SPACE. Phi-3's own tokenizer adds a space
    after every control token and drops other whitespace there, which files do not say."""
    scores = _numbers(metadata, "scores", len(_tokens(metadata)), "if")
    if scores is None or np.isnan(scores).any():
        raise _damaged("it has no scores, or some that are no numbers")
    if "unk_token" not in vocabulary.special:
        raise UnmappableError("has a SentencePiece tokenizer without an unknown token")
    # converters write user-defined runs of spaces as they are in texts
    tokens = [token if token.strip(" ") else SPACE * len(token) for token in vocabulary.tokens]
    is_phi3 = metadata.get("general.architecture") == "phi3"
    control = np.flatnonzero(vocabulary.types == TokenType.CONTROL).tolist()
    try:
        return SentencePieceBackend(
            tokens,
            scores[: len(tokens)],
            vocabulary.types,
            vocabulary.special["unk_token"],
            spaces="never" if not _value(metadata, "add_space_prefix", True) else "always" if is_phi3 else "first",
            around=(vocabulary.before, vocabulary.after),
            stripping={one for one in control if is_phi3 and tokens[one] not in PHI3_KEEPS_SPACES},
        )
    except RuntimeError as error:
        raise UnmappableError(f"has a SentencePiece tokenizer that cannot be read ({error})") from error


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> Tokenizer:
    rule, merges = PRE_TOKENIZERS[metadata[f"{PREFIX}pre"]], metadata.get(f"{PREFIX}merges")
    if not isinstance(merges, list):
        raise _damaged("it has no list of merges")
    tokens = {token: number for number, token in enumerate(vocabulary.tokens)}
    try:
        pairs = [(first, second) for first, _, second in (merge.decode().partition(" ") for merge in merges)]
        backend = Tokenizer(models.BPE(tokens, pairs, ignore_merges=rule.ignore_merges))
    except Exception as error:  # the library has no error class of its own
        raise _damaged(f"its merges do not fit its tokens: {error}") from error
    backend.normalizer = normalizers.NFC() if rule.normal_form else None  # type: ignore[assignment]
    backend.pre_tokenizer = pre_tokenizers.Sequence([_STEPS[kind](value) for kind, value in rule.steps])
    backend.decoder = decoders.ByteLevel()
    special = {TokenType.CONTROL, TokenType.UNKNOWN}
    added = np.flatnonzero(np.isin(vocabulary.types, [*special, TokenType.USER_DEFINED])).tolist()
    backend.add_tokens(
        [AddedToken(vocabulary.tokens[one], special=vocabulary.types[one] in special, normalized=False) for one in added]
    )
    around = [*vocabulary.before, "$A", *vocabulary.after]
    names = [{"id": str(one), "ids": [one], "tokens": [vocabulary.tokens[one]]} for one in around if isinstance(one, int)]
    backend.post_processor = processors.TemplateProcessing(single=[*map(str, around)], special_tokens=names)
    return backend


_STEPS = {
    "split": lambda regex: pre_tokenizers.Split(Regex(regex), "isolated"),
    "digits": lambda alone: pre_tokenizers.Digits(individual_digits=alone),
    "bytes": lambda splits: pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splits),
}
"""Kind of a pre-tokenizer's step -> makes it."""


def _chat_template(metadata: Mapping[str, Any]) -> Any:
    """A template, templates by name, or None."""
    named = {key.removeprefix(f"{TEMPLATE}."): text for key, text in metadata.items() if key.startswith(f"{TEMPLATE}.")}
    default = {} if TEMPLATE not in metadata else {"default": metadata[TEMPLATE]}
    templates = {**default, **named}
    if not all(isinstance(text, str) for text in templates.values()):
        raise _damaged("a chat template is no text")
    return templates if named else templates.get("default")


def _value(metadata: Mapping[str, Any], key: str, default: bool | str) -> Any:
    """A value of the default's type. GgufError for another type."""
    value = metadata.get(PREFIX + key, default)
    if type(value) is not type(default):
        raise _damaged(f"{PREFIX}{key} is {value!r}")
    return value


def _tokens(metadata: Mapping[str, Any]) -> list[bytes]:
    tokens = metadata.get(f"{PREFIX}tokens")
    if not isinstance(tokens, list) or not tokens:
        raise _damaged("it has no list of tokens")
    return tokens


def _types(metadata: Mapping[str, Any], size: int) -> np.ndarray:
    """The type of every id; normal if the file has none, or one that is not known."""
    types = _numbers(metadata, "token_type", size, "iu")
    if types is None:
        return np.full(size, TokenType.NORMAL, np.int32)
    return np.where(np.isin(types, [*TokenType]), types, TokenType.NORMAL).astype(np.int32)


def _numbers(metadata: Mapping[str, Any], key: str, size: int, kinds: str) -> np.ndarray | None:
    """An array with a number for every id, or None. kinds: of its dtype."""
    numbers = metadata.get(PREFIX + key)
    if numbers is not None and (not isinstance(numbers, np.ndarray) or numbers.dtype.kind not in kinds or len(numbers) != size):
        raise _damaged(f"{PREFIX}{key} does not have one number for each of {size} tokens")
    return numbers


def _id(metadata: Mapping[str, Any], key: str, size: int) -> int | None:
    """An id of the vocabulary, or None."""
    number = metadata.get(PREFIX + key)
    if number is not None and (type(number) is not int or not 0 <= number < size):
        raise _damaged(f"{PREFIX}{key} is {number!r}, and there are {size} tokens")
    return number


def _damaged(cause: str) -> GgufError:
    return GgufError(f"the tokenizer in the GGUF file is damaged, {cause}: fetch the file again")
