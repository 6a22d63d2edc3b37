"""Prefill: runs prompts into a KV cache, chunk by chunk."""

from dataclasses import dataclass
from operator import add

import torch
from torch import Tensor

from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.passes import Pass

PREFILL_CHUNK = 512  # default number of prompt tokens per row and pass
CPU_TOKENS_PER_PASS = 64
"""Number of prompt tokens that keep a CPU busy. With more, a pass takes longer in proportion, and all rows wait for it."""


@dataclass(frozen=True)
class PrefilledChunk:
    """Result of one pass over prompt tokens.

    rows: rows in the pass. last: [b, d], the hidden state of each row's last token. done: rows that have finished their prompt.
    """

    rows: range
    last: Tensor
    done: list[int]


class Prefill:
    """Runs the prompts of the rows of a cache. The row that has waited longest comes first.

    max_tokens_per_pass: a pass with at least so many prompt tokens takes no further row; None for no limit. waiting: row ->
    remaining prompt tokens [T], the row that has waited longest first.
    """

    def __init__(self, model: ModelRunner, store: KVCache) -> None:
        self.model, self.store = model, store
        self.max_tokens_per_pass: int | None = None
        self.waiting: dict[int, Tensor] = {}

    def add(self, row: int, tokens: Tensor) -> None:
        """Run tokens [T], T >= 1, after those in the row's cache."""
        self.waiting[row] = tokens.to(self.model.device)

    def remove(self, row: int) -> None:
        self.waiting.pop(row, None)

    def run(self, chunk: int) -> PrefilledChunk:
        """Run up to `chunk` prompt tokens per row: of the row that has waited longest and of the waiting rows after it."""
        rows = self._next_rows(chunk)
        parts = [self.waiting[row][:chunk] for row in rows]
        counts = [*map(len, parts)]
        tokens = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        at = self._pass(rows, counts)
        hidden = self.model.run(self.model.embed(tokens, at.positions), at, self.store, range(self.store.layers))
        for row, count in zip(rows, counts, strict=True):
            self.store.length[row] += count
            rest = self.waiting.pop(row)[count:]
            if len(rest):
                self.waiting[row] = rest
        last = on_device(counts, hidden.device) - 1
        states = hidden[torch.arange(len(rows), device=hidden.device, dtype=torch.int64), last]
        return PrefilledChunk(rows, states, [row for row in rows if row not in self.waiting])

    def _next_rows(self, chunk: int) -> range:
        """The row that has waited longest and the waiting rows directly after it, as far as they fit into the pass."""
        first = stop = next(iter(self.waiting))
        tokens, limit = 0, self.max_tokens_per_pass
        while stop in self.waiting and (limit is None or tokens < limit):
            tokens, stop = tokens + min(len(self.waiting[stop]), chunk), stop + 1
        return range(first, stop)

    def _pass(self, rows: range, counts: list[int]) -> Pass:
        bases = [self.store.length[row] for row in rows]
        end = max(map(add, bases, counts))
        self.store.reserve(end)
        width = max(counts)
        device = self.model.device
        positions = on_device(bases, device)[:, None] + torch.arange(width, device=device, dtype=torch.int64)
        even = len(set(counts)) == 1
        valid = None if even else torch.arange(width, device=device, dtype=torch.int64) < on_device(counts, device)[:, None]
        if valid is not None:  # padding has position 0, which every position table has
            positions = torch.where(valid, positions, 0)
        start = bases[0] if even and len(set(bases)) == 1 else None
        return Pass(positions, positions, valid, slice(rows.start, rows.stop), end, start)
