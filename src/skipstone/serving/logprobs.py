"""Log-probabilities of tokens, and the texts, bytes and offsets that are reported with them."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_lock import SingleTorchThread
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.detokenizer import Detokenizer
from skipstone.models.passes import Pass
from skipstone.serving.pending_request import TokenLogprobs

MIN_LOGPROB = -9999.0
"""Reported in place of minus infinity, which JSON does not have."""


def token_logprobs(logits: Tensor, tokens: list[int], count: int) -> list[TokenLogprobs]:
    """Log-probabilities of k tokens, and of the `count` likeliest tokens in their places. logits: [k, V]."""
    logprobs = logits.float().log_softmax(-1)  # [k, V]
    own = logprobs.gather(-1, torch.tensor(tokens, dtype=torch.int64, device=logprobs.device)[:, None])[:, 0]  # [k]
    best, ids = logprobs.topk(min(count, logprobs.shape[-1]), -1)  # [k, count] each
    best = best.clamp(min=MIN_LOGPROB)
    top = [list(zip(*each, strict=True)) for each in zip(ids.tolist(), best.tolist(), strict=True)]
    return [TokenLogprobs(max(one, MIN_LOGPROB), few) for one, few in zip(own.tolist(), top, strict=True)]


class PromptScorer:
    """Computes the log-probabilities of a prompt's own tokens, which `echo` asks for, in chunks between the steps of others.

    prompt: [T] int64, T >= 2. num_logprobs: likeliest tokens to report in every place. logprobs: is filled with those of tokens
    1 to T - 1; token 0 has none. nbytes: maximum bytes of its keys, values and recurrent states."""

    def __init__(self, prompt: Tensor, num_logprobs: int, logprobs: list[TokenLogprobs], nbytes: int) -> None:
        logprobs.clear()
        self.prompt, self.num_logprobs, self.logprobs, self.nbytes = prompt, num_logprobs, logprobs, nbytes
        self._store: KVCache | None = None

    @torch.inference_mode()
    def score_chunk(self, model: ModelRunner, max_tokens: int) -> None:
        """Score up to `max_tokens` further tokens, in the model's thread."""
        begin, size = len(self.logprobs), len(self.prompt) - 1
        end = min(begin + max_tokens, size)
        if self._store is None:
            self._store = KVCache(1, model.depth, size, model.kv_dtype)
            self._store.reserve(size)
        ids = self.prompt[None, begin:end].to(model.device)
        positions = torch.arange(begin, end, device=model.device, dtype=torch.int64)[None]
        at = Pass(positions, positions, None, slice(0, 1), end, begin)
        with SingleTorchThread() if model.engine.own_threads else nullcontext():
            logits = model.logits(model.run(model.embed(ids, positions), at, self._store, range(model.depth)))[0]
        self._store.length[0] = end
        self.logprobs += token_logprobs(logits, self.prompt[begin + 1 : end + 1].tolist(), self.num_logprobs)


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
