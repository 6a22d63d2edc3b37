"""What the model thinks of the tokens of a prompt itself, which `echo` asks for: read in parts, between the steps of others."""

from contextlib import nullcontext

import torch
from torch import Tensor

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.torch_threads import SingleTorchThread
from skipstone.models.passes import Pass
from skipstone.serving.jobs import Likely
from skipstone.serving.lanes import likely_of


class Reading:
    """The log-probabilities of a prompt's tokens. prompt: [T] int64, T >= 2. count: likeliest tokens that are told for every
    token. likely: is filled, with those of tokens 1 to T - 1; nothing comes before token 0."""

    def __init__(self, prompt: Tensor, count: int, likely: list[Likely]) -> None:
        likely.clear()
        self.prompt, self.count, self.likely = prompt, count, likely
        self._store: KVCache | None = None  # made in the model's thread, as it is the model that says of what kind

    @torch.inference_mode()
    def go_on(self, model: ModelRunner, most: int) -> None:
        """Read up to `most` further tokens, in the model's thread."""
        begin, size = len(self.likely), len(self.prompt) - 1
        end = min(begin + most, size)
        if self._store is None:
            self._store = KVCache(1, model.depth, size, model.kv_dtype)
            self._store.reserve(size)
        ids, positions = (
            self.prompt[None, begin:end].to(model.device),
            torch.arange(begin, end, device=model.device, dtype=torch.int64)[None],
        )
        at = Pass(positions, positions, None, slice(0, 1), end, begin)
        with SingleTorchThread() if model.own_threads else nullcontext():
            hidden = model.run(model.embed(ids, positions), at, self._store, range(model.depth))
            logits = model.logits(hidden)[0]
        self._store.length[0] = end
        self.likely += likely_of(logits, self.prompt[begin + 1 : end + 1].tolist(), self.count)
