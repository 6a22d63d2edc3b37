"""Log-probabilities of a prompt's own tokens, which `echo` asks for. They are computed in chunks, between the steps of
others."""

from contextlib import nullcontext

import torch
from torch import Tensor

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.torch_threads import SingleTorchThread
from skipstone.models.passes import Pass
from skipstone.serving.logprobs import token_logprobs
from skipstone.serving.pending_request import TokenLogprobs


class PromptScorer:
    """Computes the log-probabilities of a prompt's tokens.

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
        ids, positions = (
            self.prompt[None, begin:end].to(model.device),
            torch.arange(begin, end, device=model.device, dtype=torch.int64)[None],
        )
        at = Pass(positions, positions, None, slice(0, 1), end, begin)
        with SingleTorchThread() if model.engine.own_threads else nullcontext():
            hidden = model.run(model.embed(ids, positions), at, self._store, range(model.depth))
            logits = model.logits(hidden)[0]
        self._store.length[0] = end
        self.logprobs += token_logprobs(logits, self.prompt[begin + 1 : end + 1].tolist(), self.num_logprobs)
