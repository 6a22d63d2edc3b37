"""Token ids to text, piece by piece: the joined pieces are what the tokenizer decodes the whole to.

The text of a token depends on what stands before it: SentencePiece and WordPiece tokenizers write a space between two tokens,
and none before the first. So a completion is decoded behind the last tokens of its prompt.
"""

import codecs
from collections.abc import Iterable, Sequence, Set
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from skipstone.decoding.token_bytes import decoder_kinds, is_byte_level, token_bytes

UNREADABLE = "\ufffd"
"""Stands for bytes that are no character."""
CLEAN_UP = {
    **{f" {mark}": mark for mark in ".?!,"},
    " ' ": "'",
    **{f" {ending}": ending for ending in ("n't", "'m", "'s", "'ve", "'re")},
}
"""What transformers' `clean_up_tokenization` replaces, in this order."""
CONTEXT = 8
"""Tokens that a token is decoded behind."""


class Detokenizer:
    """Tokens to text, piece by piece. Held back are the bytes of a character that is not complete, three at most, and the
    beginning of what the tokenizer's clean-up replaces.

    prompt: the ids before the first token. A character that the prompt begins and the tokens end is text of the tokens.
    special: whether special tokens are text, too. echo: whether the text follows the prompt's own, so that `prompt_end` is
    part of it.

    prompt_end: the end of the prompt's text that its next token may change, such as the beginning of a character.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int] = (), *, special: bool = False, echo: bool = False
    ) -> None:
        self._decoder = _decoder_of(tokenizer, special)
        self._clean_up: list[_Replacement] = []
        for token in self._last_of(prompt):
            self._decoder.add(token)
        self.prompt_end = self._decoder.held()
        self._dropped = "" if echo else self.prompt_end
        if _cleans_up(tokenizer):
            self._clean_up = [_Replacement(old, new) for old, new in CLEAN_UP.items()]

    def add(self, token: int) -> str:
        """The text that one more token completes; may be empty."""
        text = self._without_prompt(self._decoder.add(token))
        for replacement in self._clean_up:
            text = replacement.add(text)
        return text

    def rest(self) -> str:
        """What is still held back at the end."""
        text = self._without_prompt(self._decoder.rest())
        for replacement in self._clean_up:
            text = replacement.add(text) + replacement.rest()
        return text

    def held(self) -> str:
        """The text of bytes that are held back, if they do not become a character."""
        return self._decoder.held()

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token, if it were added next; none of a special token that is no text. None where the tokenizer does
        not tell the bytes of a part of a character."""
        return self._decoder.bytes_of(token) if self._decoder.is_text(token) else b""

    def _last_of(self, prompt: Sequence[int]) -> list[int]:
        """The tokens at the end of a prompt that the text behind it depends on."""
        found: list[int] = []
        for token in reversed(prompt):
            if self._decoder.is_text(token):
                found.append(token)
                if len(found) >= CONTEXT and not self._decoder.is_byte(token):
                    break
        return found[::-1]

    def _without_prompt(self, text: str) -> str:
        """Without the end of the prompt's text, where no token has changed it."""
        if not (self._dropped and text):
            return text
        size = _shared(self._dropped, text)
        self._dropped = self._dropped[size:] if size == len(text) else ""
        return text[size:]


def detokenize(tokenizer: PreTrainedTokenizerBase, tokens: Iterable[int], prompt: Sequence[int] = ()) -> str:
    """The text of tokens behind a prompt, without special tokens."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(map(detokenizer.add, tokens)) + detokenizer.rest()


def incomplete(text: str, whole: str) -> int:
    """How many characters at the end of a text are the beginning of another text, but not all of it."""
    return next((size for size in range(min(len(whole) - 1, len(text)), 0, -1) if text.endswith(whole[:size])), 0)


class _Decoder(Protocol):
    """Decodes tokens before the clean-up. held: what `rest` would give."""

    def add(self, token: int) -> str: ...
    def rest(self) -> str: ...
    def bytes_of(self, token: int) -> bytes | None: ...
    def held(self) -> str: ...
    def is_text(self, token: int) -> bool: ...
    def is_byte(self, token: int) -> bool: ...


def _decoder_of(tokenizer: Any, special: bool) -> _Decoder:
    kind = type(tokenizer)
    if not isinstance(tokenizer, TokenizersBackend):
        return _AnyDecoder(tokenizer, special)
    # transformers' own classes override `decode` alone only for further options, such as CodeGen's
    plain = kind._decode is TokenizersBackend._decode and kind.decode.__module__.startswith("transformers.")
    kinds = decoder_kinds(tokenizer)
    mixed = "ByteLevel" in kinds and not is_byte_level(kinds)
    return _FastDecoder(tokenizer, special, kinds) if plain and not mixed else _AnyDecoder(tokenizer, special)


def _cleans_up(tokenizer: Any) -> bool:
    """Whether transformers' `decode` cleans up, by its own rules."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    if not isinstance(tokenizer, TokenizersBackend) or type(tokenizer.backend_tokenizer.model).__name__ != "BPE":
        return True
    return bool(tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output)


class _FastDecoder:
    """For tokenizers of the `tokenizers` library, which tell the bytes of every token. Other tokens are decoded behind the one
    before them."""

    def __init__(self, tokenizer: Any, special: bool, kinds: Set[str]) -> None:
        self._backend = tokenizer.backend_tokenizer
        added = {} if special else self._backend.get_added_tokens_decoder()
        self._skipped = {token for token, one in added.items() if one.special}
        self._kinds, self._byte_level = kinds, is_byte_level(kinds)
        self._characters = _ByteLevelCharacters() if self._byte_level else _FallbackCharacters()
        self.rest, self.held = self._characters.rest, self._characters.held
        self._before: list[int] = []  # the last token, if there is any
        self._text_before = ""

    def add(self, token: int) -> str:
        if not self.is_text(token):
            return ""
        text = self._characters.add(self.bytes_of(token), whole=not self.is_byte(token))
        self._before = [token]
        self._text_before = "" if self._byte_level else self._decoded(self._before)
        return text

    def is_text(self, token: int) -> bool:
        return token not in self._skipped and bool(self._backend.id_to_token(token))

    def is_byte(self, token: int) -> bool:
        """Whether the token is one byte of a character."""
        return not self._byte_level and token_bytes(self._backend.id_to_token(token), self._kinds) is not None

    def bytes_of(self, token: int) -> bytes:
        known = token_bytes(self._backend.id_to_token(token), self._kinds)
        if known is not None and (self._byte_level or self._before):
            return known
        text = self._decoded([*self._before, token])
        if known is not None and text:  # the first space of a text may be dropped
            return known
        return text[len(self._text_before) :].encode()

    def _decoded(self, tokens: list[int]) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)


class _ByteLevelCharacters:
    """Bytes to characters, as byte-level tokenizers do it: bytes that are the beginning of a character are one sign."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, given: bytes, *, whole: bool) -> str:
        """The characters that more bytes complete."""
        return self._decoder.decode(given)

    def rest(self) -> str:
        return self._decoder.decode(b"", final=True)

    def held(self) -> str:
        return UNREADABLE if self._decoder.getstate()[0] else ""


class _FallbackCharacters:
    """Bytes to characters, as byte fallback does it: where bytes in a row are not all characters, each of them is a sign. Only
    those that were shown as characters before stay."""

    def __init__(self) -> None:
        self._held = b""
        self._broken = False

    def add(self, given: bytes, *, whole: bool) -> str:
        """The characters that more bytes complete. whole: whether they are no part of a character."""
        if whole:
            text, self._broken = self.rest() + given.decode(), False
            return text
        self._held += given
        if not self._broken:
            try:
                text, self._held = self._held.decode(), b""
                return text
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data":
                    return ""
                self._broken = True
        return self.rest()

    def rest(self) -> str:
        text, self._held = self.held(), b""
        return text

    def held(self) -> str:
        return UNREADABLE * len(self._held)


class _AnyDecoder:
    """For any other tokenizer: decodes the last tokens anew with every token. Text is certain if a further token does not
    change it, and if it does not end with a sign for unreadable bytes, which may become a character."""

    def __init__(self, tokenizer: Any, special: bool) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._skipped = frozenset() if special else frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._raw = {"clean_up_tokenization_spaces": False} if _cleans_up(tokenizer) else {}
        self._window: list[int] = []
        self._shown = 0  # characters of the window's text

    def add(self, token: int) -> str:
        if not self.is_text(token):
            return ""
        self._window.append(token)
        text = self._decoded(self._window)
        certain = text[: _shared(text, self._decoded([*self._window, token]))]
        certain = certain[: len(certain) - _unreadable_at_end(certain)]
        piece = certain[self._shown :]
        self._shown += len(piece)
        if len(self._window) > 2 * CONTEXT:
            del self._window[:-CONTEXT]
            self._shown = max(len(self._decoded(self._window)) - (len(text) - self._shown), 0)
        return piece

    def rest(self) -> str:
        text = self.held()
        self._shown += len(text)
        return text

    def held(self) -> str:
        return self._decoded(self._window)[self._shown :]

    def bytes_of(self, token: int) -> bytes | None:
        before, text = self._decoded(self._window), self._decoded([*self._window, token])
        text = text[_shared(before, text) :]
        return None if UNREADABLE in text else text.encode()

    def is_text(self, token: int) -> bool:
        return token not in self._skipped

    def is_byte(self, token: int) -> bool:
        return False

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not self._special, **self._raw)) if tokens else ""


def _shared(first: str, second: str) -> int:
    """How many characters at the beginning of two texts are the same."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def _unreadable_at_end(text: str) -> int:
    """How many signs for unreadable bytes at the end of a text may still become a character."""
    return min(len(text) - len(text.rstrip(UNREADABLE)), 3)


class _Replacement:
    """`str.replace` on a text that comes in pieces."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new, self._held = old, new, ""

    def add(self, text: str) -> str:
        """What is certain of the text after more of it."""
        *before, last = (self._held + text).split(self._old)
        certain = len(last) - incomplete(last, self._old)
        self._held = last[certain:]
        return self._new.join([*before, last[:certain]])

    def rest(self) -> str:
        """What is still held back at the end."""
        text, self._held = self._held, ""
        return text
