"""Prompts on their way into a cache, chunk by chunk."""

from dataclasses import dataclass
from operator import add

import torch
from torch import Tensor

from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.passes import Pass

PREFILL_CHUNK = 512  # prompt tokens that a row runs in one pass, unless told
CPU_TOKENS_PER_PASS = 64
"""Prompt tokens that keep a CPU busy. Above them the time of a pass grows with its tokens, and all rows wait for it."""


@dataclass(frozen=True)
class PrefilledChunk:
    """What one pass over prompt tokens computed.

    rows: that took part. last: [b, d], the hidden state of each row's last token. done: rows with no prompt token left.
    """

    rows: range
    last: Tensor
    done: list[int]


class Prefill:
    """Runs the prompts of the rows of a cache. The row that has waited longest comes first.

    max_tokens_per_pass: a pass with so many prompt tokens takes no further row; None for no limit. waiting: row -> the prompt
    tokens [T] that it has still to run, the row that has waited longest first.
    """

    def __init__(self, model: ModelRunner, store: KVCache) -> None:
        self.model, self.store = model, store
        self.max_tokens_per_pass: int | None = None
        self.waiting: dict[int, Tensor] = {}

    def add(self, row: int, tokens: Tensor) -> None:
        """Run tokens [T], T >= 1, behind those that the row has in the cache."""
        self.waiting[row] = tokens.to(self.model.device)

    def remove(self, row: int) -> None:
        self.waiting.pop(row, None)

    def run(self, chunk: int) -> PrefilledChunk:
        """Run up to `chunk` prompt tokens of the row that has waited longest, and of the waiting rows behind it."""
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
        """The row that has waited longest, and the waiting rows right behind it that fit into the pass."""
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
        if valid is not None:  # padding repeats a real position, so that position tables are never overrun
            positions = torch.where(valid, positions, 0)
        start = bases[0] if even and len(set(bases)) == 1 else None
        return Pass(positions, positions, valid, slice(rows.start, rows.stop), end, start)
