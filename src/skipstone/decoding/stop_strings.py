"""Stop strings: strings that end a text, as in transformers' `StopStringCriteria`."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from skipstone.decoding.token_bytes import decoder_kinds, token_bytes

_PREFIX = "abcdef"
"""Text before a token, so that the tokenizer does not strip the token's leading space."""


class StopStrings:
    """Strings that end a text. The token that completes one stays in the text.

    strings: at least one, none empty. tokenizer: a transformers tokenizer. counts_prompt: whether a string may begin in the
    prompt, as in `model.generate`. Tokens are compared as bytes, because a character may consist of several tokens.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self.strings, self.counts_prompt = tuple(strings), True
        self._encoded = [string.encode() for string in self.strings]
        self._longest = max(map(len, self._encoded))
        self._tokenizer, self._kinds = tokenizer, decoder_kinds(tokenizer)
        self._prefix = tokenizer.convert_ids_to_tokens(tokenizer(_PREFIX, add_special_tokens=False)["input_ids"])
        self._bytes: dict[int, bytes] = {}  # cache: token -> bytes

    def without_prompt(self) -> "StopStrings":
        """The same strings, searched in new tokens only, as in OpenAI's API."""
        other = copy.copy(self)
        other.counts_prompt = False
        return other

    def completed_by_last(self, prompt: Tensor, tokens: Sequence[int]) -> bool:
        """Whether the last token completes a stop string. prompt: [T] int64. tokens: all new tokens, at least one."""
        text = last = self._bytes_of(tokens[-1])
        needed = self._longest - 1 + len(last)
        for token in reversed(tokens[:-1][-self._longest :]):
            if len(text) >= needed:
                break
            text = self._bytes_of(token) + text
        if self.counts_prompt and len(text) < needed:
            for token in reversed(prompt[-self._longest :].tolist()):
                text = self._bytes_of(token) + text
        begin = len(text) - len(last)  # a string that ends before it was completed by an earlier token
        return bool(last) and any(text.find(string, max(0, begin - len(string) + 1)) >= 0 for string in self._encoded)

    def _bytes_of(self, token: int) -> bytes:
        if token not in self._bytes:
            self._bytes[token] = self._converted(self._tokenizer.convert_ids_to_tokens(token))
        return self._bytes[token]

    def _converted(self, token: str | None) -> bytes:
        """The bytes of a token of the vocabulary; empty for an id without a token."""
        if token is None:
            return b""
        if (known := token_bytes(token, self._kinds)) is not None:
            return known
        text = self._tokenizer.convert_tokens_to_string([*self._prefix, token])
        return text[text.index(_PREFIX) + len(_PREFIX) :].encode()
