"""Prefill: runs prompts into a KV cache, chunk by chunk."""

from collections.abc import Mapping
from itertools import pairwise
from operator import add

import torch
from torch import Tensor

from skipstone.engines.host_transfer import on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.passes import Pass

PREFILL_CHUNK = 512  # default number of prompt tokens per row and pass
CPU_PROMPT_TOKENS_PER_PASS = 64
"""Number of prompt tokens that keep a CPU busy (docs/lab/performance.md). With more, a pass takes longer in proportion, and all
rows wait for it."""


class Prefill:
    """Runs the prompts of the rows of a cache. The row with the earliest deadline comes first.

    The deadline of a prompt of T tokens is reached when T further prompt tokens have run. So a short prompt overtakes a long
    one, but prompts that come much later do not.

    waiting: row -> remaining prompt tokens [T], in the order of their deadlines. feature_depths: numbers of layers. features:
    row -> states [n, E * d] that its tokens of the latest pass have after each of them, next to each other.
    """

    def __init__(self, model: ModelRunner, store: KVCache, feature_depths: tuple[int, ...] = ()) -> None:
        self.model, self.store, self.feature_depths = model, store, feature_depths
        self.features: dict[int, Tensor] = {}
        self.waiting: dict[int, Tensor] = {}
        self._deadlines: dict[int, int] = {}  # row -> value of `_num_run`
        self._num_run = 0  # prompt tokens so far

    def add(self, row: int, tokens: Tensor) -> None:
        """Run tokens [T], T >= 1, after those in the row's cache."""
        self.waiting[row] = tokens.to(self.model.device)
        self._deadlines[row] = self._num_run + len(tokens)
        self.waiting = dict(sorted(self.waiting.items(), key=lambda item: self._deadlines[item[0]]))

    def remove(self, row: int) -> None:
        self.waiting.pop(row, None)

    def run(
        self, chunk: int, max_prompt_tokens_per_pass: int | None = None, next_tokens: Mapping[int, Tensor] | None = None
    ) -> dict[int, Tensor]:
        """Run one pass with up to `chunk` prompt tokens per row.

        max_prompt_tokens_per_pass: maximum number of all rows together, padding included if it costs time; None for no limit.
        next_tokens: row -> its next token [1], for rows that decode.

        Returns row -> hidden state [d] of its last token, for rows that decode or have finished their prompt.
        """
        prompts = self._next_chunks(chunk, max_prompt_tokens_per_pass)
        states = self._run_pass({**prompts, **(next_tokens or {})})
        for row, tokens in prompts.items():
            self._num_run += len(tokens)
            self.waiting[row] = self.waiting[row][len(tokens) :]
            if len(self.waiting[row]):
                del states[row]
            else:
                del self.waiting[row]
        return states

    def _next_chunks(self, chunk: int, limit: int | None) -> dict[int, Tensor]:
        """Row -> prompt tokens of the next pass. limit: maximum number of them; None for no limit."""
        if not self.model.engine.skips_padding:
            return self._next_block(chunk, limit)
        chunks, remaining = dict[int, Tensor](), sum(map(len, self.waiting.values())) if limit is None else limit
        for row, tokens in self.waiting.items():
            if remaining:
                chunks[row] = tokens[: min(chunk, remaining)]
                remaining -= len(chunks[row])
        return chunks

    def _next_block(self, chunk: int, limit: int | None) -> dict[int, Tensor]:
        """The same of the first row and of waiting rows next to it. If there is a limit, no row runs more tokens than the
        first."""
        first, max_rows = next(iter(self.waiting)), self.store.rows
        if limit is not None:
            chunk = min(chunk, limit, len(self.waiting[first]))
            max_rows = limit // chunk
        stop = first + 1
        while stop in self.waiting and stop - first < max_rows:
            stop += 1
        while first - 1 in self.waiting and stop - first < max_rows:
            first -= 1
        return {row: self.waiting[row][:chunk] for row in range(first, stop)}

    def _run_pass(self, tokens: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Run the next tokens [T] of some rows. Returns row -> hidden state [d] of its last token."""
        rows, nothing = range(min(tokens), max(tokens) + 1), next(iter(tokens.values()))[:0]
        parts = [tokens.get(row, nothing) for row in rows]
        at = self._pass(rows, [*map(len, parts)])
        ids = torch.nn.utils.rnn.pad_sequence(parts, batch_first=True)
        hidden, recorded = self._enter(ids, at), dict[int, Tensor]()
        for low, high in pairwise(sorted({0, *self.feature_depths, self.store.layers})):
            hidden = recorded[high] = self._run_layers(hidden, at, range(low, high))
        for row, part in tokens.items():
            self.store.length[row] += len(part)
        if self.feature_depths:
            features = torch.cat([recorded[depth] for depth in self.feature_depths], -1)
            self.features = {row: features[row - rows.start, : len(part)].clone() for row, part in tokens.items()}
        return {row: hidden[row - rows.start, len(part) - 1] for row, part in tokens.items()}

    def _enter(self, ids: Tensor, at: Pass) -> Tensor:
        """The states that enter layer 0, [b, n, d]."""
        return self.model.embed(ids, at.positions)

    def _run_layers(self, hidden: Tensor, at: Pass, layers: range) -> Tensor:
        return self.model.run(hidden, at, self.store, layers)

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
