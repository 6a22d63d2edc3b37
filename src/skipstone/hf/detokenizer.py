"""Decodes token ids piece by piece. The joined pieces equal the tokenizer's decoding of the whole.

A token's text depends on the tokens before it: SentencePiece and WordPiece tokenizers write a space between two tokens and none
before the first. So a completion is decoded after the last tokens of its prompt.
"""

import codecs
import sys
from collections.abc import Iterable, Sequence, Set
from typing import Any

from skipstone.decoding.token_bytes import decoder_kinds, is_byte_level, token_bytes
from skipstone.models.tokenizer import CheckpointTokenizer

UNREADABLE = "\ufffd"
"""Replacement for bytes that are no character."""
CLEAN_UP = {
    **{f" {mark}": mark for mark in ".?!,"},
    " ' ": "'",
    **{f" {ending}": ending for ending in ("n't", "'m", "'s", "'ve", "'re")},
}
"""Replacements of transformers' `clean_up_tokenization`, in order."""
CONTEXT = 8
"""Number of preceding tokens for decoding a token."""


class Detokenizer:
    """Decodes tokens piece by piece. It holds back incomplete characters (at most three bytes), and text that the tokenizer's
    clean-up may still replace.

    prompt: the ids before the first token. A character that begins in the prompt and ends in the tokens belongs to the tokens.
    special: whether special tokens are text. prompt_end: the end of the prompt's text that the next token may change, such as
    an incomplete character. echo: whether the text includes `prompt_end`, because the prompt's own text precedes it.
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int] = (), *, special: bool = False, echo: bool = False) -> None:
        self._decoder = _decoder_of(tokenizer, special)
        self._clean_up: list[_Replacement] = []
        for token in self._last_of(prompt):
            self._decoder.add(token)
        self.prompt_end = self._decoder.held()
        self._dropped = "" if echo else self.prompt_end
        if _cleans_up(tokenizer):
            self._clean_up = [_Replacement(old, new) for old, new in CLEAN_UP.items()]

    def add(self, token: int) -> str:
        """Add a token. Returns the text that it completes, which may be empty."""
        text = self._without_prompt(self._decoder.add(token))
        for replacement in self._clean_up:
            text = replacement.add(text)
        return text

    def rest(self) -> str:
        """End the text. Returns what is still held back."""
        text = self._without_prompt(self._decoder.rest())
        for replacement in self._clean_up:
            text = replacement.add(text) + replacement.rest()
        return text

    def held(self) -> str:
        """The text of the bytes held back if no further token completes them."""
        return self._decoder.held()

    def bytes_of(self, token: int) -> bytes | None:
        """The bytes of a token as the next one; empty for a special token that is no text.

        None if the tokenizer does not give the bytes of a part of a character."""
        return self._decoder.bytes_of(token) if self._decoder.is_text(token) else b""

    def _last_of(self, prompt: Sequence[int]) -> list[int]:
        """The last tokens of a prompt, on which the text after it depends."""
        last: list[int] = []
        for token in reversed(prompt):
            if self._decoder.is_text(token):
                last.append(token)
                if len(last) >= CONTEXT and not self._decoder.is_byte(token):
                    break
        return last[::-1]

    def _without_prompt(self, text: str) -> str:
        """A piece without the unchanged end of the prompt's text."""
        if not (self._dropped and text):
            return text
        size = _shared_prefix(self._dropped, text)
        self._dropped = self._dropped[size:] if size == len(text) else ""
        return text[size:]


def detokenize(tokenizer: Any, tokens: Iterable[int], prompt: Sequence[int] = ()) -> str:
    """The text of tokens after a prompt, without special tokens."""
    detokenizer = Detokenizer(tokenizer, prompt)
    return "".join(map(detokenizer.add, tokens)) + detokenizer.rest()


def incomplete(text: str, whole: str) -> int:
    """Length of the longest end of `text` that is a beginning of `whole`, but not all of it."""
    return next((size for size in range(min(len(whole) - 1, len(text)), 0, -1) if text.endswith(whole[:size])), 0)


def _decoder_of(tokenizer: Any, special: bool) -> "_ByteLevelDecoder | _AnyDecoder":
    if _decodes_as_backend(tokenizer):
        kinds = decoder_kinds(tokenizer)
        if is_byte_level(kinds):
            return _ByteLevelDecoder(tokenizer, special, kinds)
        if "ByteLevel" not in kinds:
            return _FallbackDecoder(tokenizer, special, kinds)
    return _AnyDecoder(tokenizer, special)


def _decodes_as_backend(tokenizer: Any) -> bool:
    """Whether texts are those of the `tokenizers` library, apart from transformers' clean-up."""
    kind, backend = type(tokenizer), _fast_class(tokenizer)
    if backend is None:
        return isinstance(tokenizer, CheckpointTokenizer)
    # classes of transformers that override only `decode` do so for further options, such as CodeGen's
    return kind._decode is backend._decode and kind.decode.__module__.startswith("transformers.")


def _fast_class(tokenizer: Any) -> Any:
    """transformers' base class of fast tokenizers if a tokenizer is one, else None. Importing the class takes seconds."""
    backend = getattr(sys.modules.get("transformers.tokenization_utils_tokenizers"), "TokenizersBackend", None)
    return backend if backend is not None and isinstance(tokenizer, backend) else None


def _cleans_up(tokenizer: Any) -> bool:
    """Whether transformers' `decode` cleans up, by its own rules."""
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    if _fast_class(tokenizer) is None or type(tokenizer.backend_tokenizer.model).__name__ != "BPE":
        return True
    return bool(tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output)


class _ByteLevelDecoder:
    """For byte-level tokenizers of the `tokenizers` library: UNREADABLE stands for an incomplete character.

    Like the other two it decodes before the clean-up. held: the result of `rest`, without ending the text."""

    def __init__(self, tokenizer: Any, special: bool, kinds: Set[str]) -> None:
        self._backend, self._kinds = tokenizer.backend_tokenizer, kinds
        added = {} if special else self._backend.get_added_tokens_decoder()
        self._skipped = {number for number, token in added.items() if token.special}
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self._utf8.decode(self.bytes_of(token)) if self.is_text(token) else ""

    def rest(self) -> str:
        return self._utf8.decode(b"", final=True)

    def held(self) -> str:
        return self._utf8.getstate()[0].decode(errors="replace")

    def bytes_of(self, token: int) -> bytes:
        return self._known(token) or b""

    def is_text(self, token: int) -> bool:
        return token not in self._skipped and bool(self._backend.id_to_token(token))

    def is_byte(self, token: int) -> bool:
        """Whether the token is a single byte of a character."""
        return False

    def _known(self, token: int) -> bytes | None:
        return token_bytes(self._backend.id_to_token(token), self._kinds)


class _FallbackDecoder(_ByteLevelDecoder):
    """For other tokenizers of the library, with byte fallback or without. A token that is no byte is decoded after the previous
    one. If a run of bytes is not valid UTF-8, each byte becomes an UNREADABLE. Characters that were already returned stay."""

    _before: tuple[int, ...] = ()  # the last token, if any
    _held = b""
    _broken = False

    def add(self, token: int) -> str:
        if not self.is_text(token):
            return ""
        given, self._before = self.bytes_of(token), (token,)
        if not self.is_byte(token):
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

    def bytes_of(self, token: int) -> bytes:
        known = self._known(token)
        if known is not None and self._before:
            return known
        text = self._decoded(*self._before, token)
        if known is not None and text:  # empty if the tokenizer drops a text's first space
            return known
        return text[len(self._decoded(*self._before)) :].encode()

    def is_byte(self, token: int) -> bool:
        return self._known(token) is not None

    def _decoded(self, *tokens: int) -> str:
        return self._backend.decode(tokens, skip_special_tokens=False)


class _AnyDecoder:
    """For any other tokenizer: decodes the last tokens again with every token.

    Text is final if another token does not change it, and if it does not end in UNREADABLE, which may become a character."""

    def __init__(self, tokenizer: Any, special: bool) -> None:
        self._tokenizer, self._special = tokenizer, special
        self._skipped = frozenset() if special else frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._raw = {"clean_up_tokenization_spaces": False} if _cleans_up(tokenizer) else {}
        self._window: list[int] = []
        self._shown = 0  # number of returned characters of the window's text

    def add(self, token: int) -> str:
        if not self.is_text(token):
            return ""
        self._window.append(token)
        text = self._decoded(self._window)
        final = text[: _shared_prefix(text, self._decoded([*self._window, token]))]
        final = final[: len(final) - _unreadable_at_end(final)]
        piece = final[self._shown :]
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
        text = text[_shared_prefix(before, text) :]
        return None if UNREADABLE in text else text.encode()

    def is_text(self, token: int) -> bool:
        return token not in self._skipped

    def is_byte(self, token: int) -> bool:
        return False

    def _decoded(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=not self._special, **self._raw)) if tokens else ""


def _shared_prefix(first: str, second: str) -> int:
    """Length of the common beginning of two texts."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


def _unreadable_at_end(text: str) -> int:
    """Number of UNREADABLE at the end of a text that may still become a character."""
    return min(len(text) - len(text.rstrip(UNREADABLE)), 3)


class _Replacement:
    """`str.replace` on a text in pieces."""

    def __init__(self, old: str, new: str) -> None:
        self._old, self._new, self._held = old, new, ""

    def add(self, text: str) -> str:
        """Add a piece. Returns the text that is final."""
        *before, last = (self._held + text).split(self._old)
        size = len(last) - incomplete(last, self._old)
        self._held = last[size:]
        return self._new.join([*before, last[:size]])

    def rest(self) -> str:
        """End the text. Returns what is still held back."""
        text, self._held = self._held, ""
        return text
