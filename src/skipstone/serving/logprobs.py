"""Log-probabilities of tokens, and the texts, bytes and offsets that are reported with them."""

from collections.abc import Sequence
from typing import Any

import torch

from skipstone.hf.detokenizer import Detokenizer
from skipstone.serving.pending_request import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Reported in place of minus infinity, which JSON does not have."""


def token_logprobs(logits: torch.Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of k tokens, and of the `count` likeliest tokens in their places. logits: [k, V]."""
    logprobs = logits.float().log_softmax(-1)  # [k, V]
    own = logprobs.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=logprobs.device)[:, None])[:, 0]  # [k]
    best, ids = logprobs.topk(min(count, logprobs.shape[-1]), -1)  # [k, count] each
    best = best.clamp(min=MIN_LOGPROB)
    top = [list(zip(*each, strict=True)) for each in zip(ids.tolist(), best.tolist(), strict=True)]
    return [TokenLogprobs(max(one, MIN_LOGPROB), few) for one, few in zip(own.tolist(), top, strict=True)]


class TokenReader:
    """Reads the tokens of a text in order. prompt: ids before the first. ends: ids of end-of-text tokens, which are not text.
    special: whether special tokens are text."""

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int] = (), ends: frozenset[int] = frozenset(), *, special: bool = False
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt, special=special)
        self._tokenizer, self.ends = tokenizer, ends
        self._length = 0

    def add(self, token: int) -> int:
        """Read the next token. Returns its offset in the text, in characters; for a further part of a character, that of the
        character."""
        if token in self.ends:
            return self._length
        held, text, place = self._detokenizer.held(), self._detokenizer.add(token), self._length
        self._length += len(text)
        return place + (len(held) if text.startswith(held) else 0)

    def text(self, token: int) -> str:
        """The text of a token that may come next; U+FFFD for a part of a character. A token that is no text has its name."""
        return self._text(token, self._bytes(token))

    def entry(self, token: int, logprob: float) -> dict[str, Any]:
        """A token that may come next, in a chat's form. bytes: None if the tokenizer does not know them."""
        found = self._bytes(token)
        return {"token": self._text(token, found), "logprob": logprob, "bytes": None if found is None else list(found)}

    def _text(self, token: int, found: bytes | None) -> str:
        return found.decode(errors="replace") if found else str(self._tokenizer.decode([token]))

    def _bytes(self, token: int) -> bytes | None:
        return b"" if token in self.ends else self._detokenizer.bytes_of(token)
