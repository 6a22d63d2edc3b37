"""SentencePiece vocabularies as tokenizers. The `tokenizers` library needs their merges, and deriving them takes seconds."""

import hashlib
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import IntEnum
from itertools import chain
from typing import Any, Literal

import numpy as np
from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken

from skipstone.models.tokenizer_classes import llama_steps
from skipstone.utils.cached_property import cached_property

SPACE = "▁"
"""How SentencePiece writes a space."""
Spaces = Literal["never", "first", "always"]
"""Where a space is added: nowhere, at the beginning of a text, or there and after every token that is found whole."""
_UNKNOWN_PIECE = "<no token of the vocabulary>"


class TokenType(IntEnum):
    """Types of tokens, the same numbers in GGUF files and SentencePiece models."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Encoding:
    """The ids of a text."""

    ids: list[int]


class SentencePieceBackend:
    """The part of a `tokenizers.Tokenizer` that a CheckpointTokenizer needs, on a SentencePiece BPE vocabulary.

    tokens: the token of every id. scores: float32 [tokens]. types: TokenType of every id, int32 [tokens]. unknown_id: for
    characters without a token, if there are no tokens of bytes. spaces: where a space is added. before, after: ids around a
    text. stripping: ids of tokens that drop the whitespace after them. RuntimeError if the sentencepiece library does not
    accept the vocabulary.

    Control and user-defined tokens are found anywhere in a text, the longest first.
    """

    def __init__(
        self,
        tokens: Sequence[str],
        scores: np.ndarray,
        types: np.ndarray,
        unknown_id: int,
        spaces: Spaces,
        around: tuple[Sequence[int], Sequence[int]] = ((), ()),
        stripping: Set[int] = frozenset(),
    ) -> None:
        self._size, self.unknown_id, self._spaces = len(tokens), unknown_id, spaces
        self._before, self._after = map(list, around)
        self._stripping = {tokens[number] for number in stripping}
        types = types.copy()
        types[unknown_id] = TokenType.UNKNOWN
        self._special = set(np.flatnonzero(np.isin(types, (TokenType.CONTROL, TokenType.UNKNOWN))).tolist())
        is_added = np.isin(types, (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED))
        self._added = {number: tokens[number] for number in np.flatnonzero(is_added).tolist()}
        types[is_added] = TokenType.USER_DEFINED  # the library finds tokens of no other type whole
        self._processor = SentencePieceProcessor(model_proto=_model(tokens, scores, types))
        self.decoder: Any = llama_steps({"add_prefix_space": spaces != "never"})[2]

    def encode(self, text: str, add_special_tokens: bool = True) -> Encoding:
        """The ids of a text. TypeError for a text with lone surrogates."""
        try:
            ids = self._processor.encode(self._with_spaces(text).encode())
        except UnicodeEncodeError as error:
            raise TypeError(f"a text has no lone surrogates, found one at {error.start}") from error
        if self._size in ids:
            ids = [self.unknown_id if number == self._size else number for number in ids]
        return Encoding([*self._before, *ids, *self._after] if add_special_tokens else ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[Encoding]:
        """The ids of every text."""
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ids; ids without a token have none."""
        skipped = self._special if skip_special_tokens else ()
        tokens = [self.id_to_token(number) for number in ids if number not in skipped]
        return str(self.decoder.decode([token for token in tokens if token is not None]))

    def id_to_token(self, number: int) -> str | None:
        """The token of an id; None for an id without one."""
        if number in self._added:
            return self._added[number]
        return self._processor.id_to_piece(number) if 0 <= number < self._size else None

    def token_to_id(self, token: str) -> int | None:
        """The id of a token; None for another text."""
        number = self._processor.piece_to_id(_piece(token))
        return number if number < self._size and self.id_to_token(number) == token else None

    def get_vocab(self, with_added_tokens: bool = True) -> dict[str, int]:
        """Token -> id. Added tokens are in the vocabulary in any case."""
        return {str(self.id_to_token(number)): number for number in range(self._size)}

    def get_vocab_size(self, with_added_tokens: bool = True) -> int:
        """Number of ids."""
        return self._size

    def get_added_tokens_decoder(self) -> dict[int, AddedToken]:
        """Id -> token that is found anywhere in a text."""
        special = self._special
        return {number: AddedToken(one, special=number in special, normalized=False) for number, one in self._added.items()}

    def to_str(self) -> str:
        """A hash of the vocabulary and the settings."""
        settings = f"{self._before} {self._after} {self._spaces} {sorted(self._stripping)} {self.unknown_id}"
        return hashlib.sha256(self._processor.serialized_model_proto() + settings.encode()).hexdigest()

    def _with_spaces(self, text: str) -> str:
        if self._spaces == "always":
            parts, before = [], ""
            for part in self._pattern.split(text):
                words = part.lstrip() if before in self._stripping else part
                parts.append(f" {words}" if words and words not in self._whole else words)
                before = part
            return "".join(parts)
        return f" {text}" if self._spaces == "first" and text and not self._pattern.match(text) else text

    @cached_property
    def _whole(self) -> set[str]:
        return {*self._added.values()}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(f"({'|'.join(map(re.escape, sorted(self._whole, key=len, reverse=True)))})")


def _piece(token: str) -> str:
    """A token as SentencePiece writes it."""
    return token.replace(" ", SPACE)


def _model(tokens: Sequence[str], scores: np.ndarray, types: np.ndarray) -> bytes:
    """A SentencePiece model in the format of sentencepiece_model.proto. Its last piece stands for unknown characters."""
    pieces = [_piece(token).encode() for token in (*tokens, _UNKNOWN_PIECE)]
    ends = np.zeros(len(pieces), [("score_tag", "u1"), ("score", "<f4"), ("type_tag", "u1"), ("type", "u1")])
    ends["score_tag"], ends["type_tag"] = 2 << 3 | 5, 3 << 3  # fields 2 (of 4 bytes) and 3 (a varint)
    ends["score"][:-1], ends["type"][:-1], ends["type"][-1] = scores, types, TokenType.UNKNOWN
    sizes = [*map(len, pieces)]
    heads = {size: _field(1, size + 1 + len(_varint(size)) + ends.itemsize) + _field(1, size) for size in set(sizes)}
    parts = zip(map(heads.__getitem__, sizes), pieces, ends.view(f"V{ends.itemsize}").tolist(), strict=True)
    has_bytes = bool((types == TokenType.BYTE).any())
    trainer = _varint(3 << 3) + _varint(2) + _varint(35 << 3) + _varint(has_bytes)  # model_type BPE, byte_fallback
    normalizer = b"".join(_varint(number << 3) + _varint(value) for number, value in ((3, 0), (4, 0), (5, 1)))
    return b"".join(
        (*chain.from_iterable(parts), _field(2, len(trainer)), trainer, _field(3, len(normalizer)), normalizer)
    )  # no space at the beginning, all spaces are kept, and written as SPACE


def _field(number: int, size: int) -> bytes:
    """The tag and the length of a field."""
    return _varint(number << 3 | 2) + _varint(size)


def _varint(value: int) -> bytes:
    digits = [value >> shift & 127 for shift in range(0, max(value.bit_length(), 1), 7)]
    return bytes([*(digit | 128 for digit in digits[:-1]), digits[-1]])
