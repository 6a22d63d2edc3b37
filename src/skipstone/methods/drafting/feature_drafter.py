"""Drafting with a head that reads the target's hidden states: EAGLE-3 and MTP.

Shapes: B rows, E feature depths, D size of the target's states, d size of a column's state, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, RowVerdict
from skipstone.decoding.drafter import Candidate
from skipstone.decoding.method import DraftingMethod
from skipstone.decoding.prefill import PREFILL_CHUNK, Prefill
from skipstone.decoding.request import Request
from skipstone.decoding.settings import RejectionRule, setting
from skipstone.engines.feature_head import FeatureHead
from skipstone.engines.host_transfer import on_device, to_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.methods.drafting.candidates import model_size
from skipstone.methods.drafting.chain import DraftChain, OwnCacheDrafter
from skipstone.methods.drafting.chain_stop_rule import Threshold
from skipstone.models.passes import Pass, SkipSet
from skipstone.policy.draft_length import MAX_DRAFTS

MAX_UNREAD = 64
"""Number of unread columns of a row that the head reads although it does not draft, so that their states take little memory. A
pass over that many tokens keeps the hardware busy."""


@dataclass(frozen=True, kw_only=True)
class FeatureMethod(DraftingMethod):
    """Common settings of methods that draft with a head."""

    num_speculative_tokens: int = setting(3, "maximum drafts a step.", kw_only=True)
    confidence_threshold: Threshold = setting(
        None, "a draft less probable than this is the last of its step; none: no such limit.", within=(0, 1), kw_only=True
    )
    rejection_sample_method: RejectionRule = setting(
        "standard", '"standard" is Leviathan\'s rule; "coupled" draws drafts from the target\'s own noise', kw_only=True
    )

    def head_for(self, target: ModelRunner) -> FeatureHead:
        """The head for a target, loaded once. OSError or ValueError if there is none that fits."""
        raise NotImplementedError

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        if model.family.streams > 1 or model.family.per_layer_inputs:
            raise ValueError(f"{self.name} reads one hidden state per token, and this {model.config.model_type} model has more")
        self.head_for(model)

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> "FeatureDrafter":
        settings = {"max_drafts": self.num_speculative_tokens, "threshold": self.confidence_threshold}
        coupled = self.rejection_sample_method == "coupled"
        return FeatureDrafter(model, self.head_for(model), rows, capacity, coupled=coupled, **settings)

    def auto_candidates(self, model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
        """One candidate. It drafts chains, and `auto` decides their length."""
        head = self.head_for(model)
        drafter = FeatureDrafter(model, head, rows, capacity, max_drafts=MAX_DRAFTS, threshold=None, coupled=True)
        ratio = sum(weight.numel() for weight in head.weights) / model_size(model)
        return {self.name: Candidate(drafter, lambda: head.fingerprint, ratio, ratio)}


class ColumnReader(Prefill):
    """Runs a head over columns that have entered its layer: `add` takes [n, w] in the place of ids. skip: sublayers that it
    leaves out."""

    def __init__(self, head: FeatureHead, store: KVCache, skip: SkipSet | None) -> None:
        super().__init__(head, store)
        self._skip = skip

    def _enter(self, ids: Tensor, at: Pass) -> Tensor:
        return ids

    def _run_layers(self, hidden: Tensor, at: Pass, layers: range) -> Tensor:
        return self.model.run(hidden, at, self.store, layers, self._skip)


class FeatureDrafter(OwnCacheDrafter):
    """Drafts chains with a head.

    Column p of a row is the target's state of token p next to token p + 1. After n committed tokens the target's states of
    tokens 0 to n - 2 are known, so there are n - 1 columns. The output of the last one gives the first draft. The head's KV
    cache has the columns that it has read, and behind them columns of drafts, which the next columns overwrite.

    unread: for every row, the target's states [n, E * D] of columns that the head has not read, in order. At least the last
    column of a row stays unread until the head drafts. What a request leaves in its row stays for the next one.
    """

    def __init__(self, model: ModelRunner, head: FeatureHead, rows: int, capacity: int, **settings: Any) -> None:
        super().__init__(model, head, rows, capacity, **settings)
        self.head, self.feature_depths = head, head.depths
        self.unread: list[list[Tensor]] = [[] for _ in range(rows)]
        self._state: Tensor | None = None  # [B, 1, d], next to the newest draft
        self._bases: list[int] = []  # number of columns of every row at the start of a draft
        self._first: Tensor | None = None  # [B, 1] int64, the same on the device

    # ------------------------------------------------------------------------------------------------ requests and rows

    @torch.inference_mode()
    def reusable_tokens(self, row: int, count: int) -> int:
        """One token fewer: its column has the first token of the other text, and needs the target's state again."""
        missing = min(count - 1 - self.store.length[row], self._num_unread(row) - 1)
        if missing > 0:
            self._store_columns({row: missing})
        return max(0, min(count - 1, self.store.length[row]))

    def reuse_tokens(self, row: int, source_row: int, count: int) -> None:
        if source_row != row:
            self.store.copy(source_row, row, count)
        self.store.length[row] = count
        self.unread[row].clear()

    def add_request(self, row: int, request: Request) -> None:
        super().add_request(row, request)
        self.text[row] = request.prompt.tolist()

    def observe_features(self, features: dict[int, Tensor]) -> None:
        for row, states in features.items():
            self.unread[row].append(states)
        counts = {row: self._num_unread(row) - 1 for row in features}
        if long := {row: count for row, count in counts.items() if count >= MAX_UNREAD}:
            self._store_columns(long)

    def observe_commits(self, draft: Draft | None, verdicts: list[RowVerdict]) -> None:
        super().observe_commits(draft, verdicts)
        for row, verdict in enumerate(verdicts):
            self.text[row] += verdict.tokens

    # ------------------------------------------------------------------------------------------------ columns

    def _num_unread(self, row: int) -> int:
        """Number of unread columns of a row: their states and tokens are known."""
        return min(sum(map(len, self.unread[row])), len(self.text[row]) - 1 - self.store.length[row])

    def _take(self, counts: dict[int, int]) -> tuple[Tensor, Tensor]:
        """Take the first unread columns of some rows. Returns tokens [n] int64 and states [n, d] of all of them."""
        tokens, states = list[int](), list[Tensor]()
        for row, count in counts.items():
            own, begin = torch.cat(self.unread[row]), self.store.length[row] + 1
            states.append(own[:count])
            self.unread[row] = [own[count:].clone()]  # a view would keep all of them
            tokens += self.text[row][begin : begin + count]
        return on_device(tokens, self.head.device), self.head.read_states(torch.cat(states))

    def _store_columns(self, counts: dict[int, int]) -> None:
        """Write keys and values of the first unread columns of some rows. They do not depend on the MLP."""
        self._read(counts, None if self.head.family.unskippable else SkipSet(mlp=frozenset([0])))

    def _read(self, counts: dict[int, int], skip: SkipSet | None = None) -> dict[int, Tensor]:
        """Run the first unread columns of some rows. Returns row -> [d] after its last one."""
        columns = self.head.enter(*self._take(counts))
        reader, read = ColumnReader(self.head, self.store, skip), dict[int, Tensor]()
        for (row, _), own in zip(counts.items(), columns.split([*counts.values()]), strict=True):
            reader.add(row, own)
        while reader.waiting:
            read |= reader.run(PREFILL_CHUNK)
        return read

    def tokens_to_replay(self, row: int, count: int) -> int:
        return max(self._num_unread(row) - 1, count)

    def replay_tokens(self, row: int, tokens: Sequence[int]) -> Tensor | None:
        """The logits of unread columns but the last, which the head reads."""
        store, count, older = self.store, len(tokens) - 1, self._num_unread(row) - len(tokens)
        if older < 0:
            return None
        if older:
            self._store_columns({row: older})
        columns, begin = self.head.enter(*self._take({row: count})), store.length[row]
        store.reserve(begin + count)
        positions = torch.arange(begin, begin + count, device=self.head.device, dtype=torch.int64)[None]
        at = Pass(positions, positions, None, slice(row, row + 1), begin + count, begin)
        hidden = self.head.run(columns[None], at, store, range(1))
        store.length[row] = begin + count
        return to_device(self.head.logits(hidden)[0], self.model.device)

    # ------------------------------------------------------------------------------------------------ one step

    def next_logits(self, chain: DraftChain, forward: PartialForward) -> Tensor:
        """Logits of the head after the newest token. It never reads the last token of a chain."""
        live, device = [row for row, alive in enumerate(self.view.alive) if alive], self.head.device
        if not len(chain):
            read = self._read({row: self._num_unread(row) for row in live})
            some = next(iter(read.values()))
            hidden = torch.stack([read.get(row, some) for row in range(self.view.rows)])[:, None]  # [B, 1, d]
            self._bases = [length if alive else 0 for length, alive in zip(self.store.length, self.view.alive, strict=True)]
            self._first = on_device(self._bases, device)[:, None]
        else:
            assert self._state is not None
            tokens, valid = chain.newest
            columns = self.head.enter(to_device(tokens, device), self._state)
            hidden = self.head.run(columns, self._pass(len(chain) - 1, valid), self.store, range(1))
        self._state = self.head.feed_back(hidden)
        return to_device(self.head.logits(hidden)[:, 0], self.model.device)

    def _pass(self, place: int, valid: Tensor | None) -> Pass:
        """The pass over the drafts at one place of their chains. valid: [B, 1] bool, None for all rows that decode."""
        device, rows, alive = self.head.device, self.view.rows, self.view.alive
        end = min(max(self._bases) + place + 1, self.store.limit)  # a row at its limit takes no part in the pass
        assert self._first is not None
        positions = (self._first + place).clamp(max=end - 1)
        self.store.reserve(end)
        if valid is not None:
            valid = to_device(valid, device)
        if not all(alive):
            decoding = on_device(alive, device, torch.bool)[:, None]
            valid = decoding if valid is None else valid & decoding
        uniform = valid is None and len(set(self._bases)) == 1
        return Pass(positions, positions, valid, slice(0, rows), end, end - 1 if uniform else None)

    def draft_in_one_call(self, max_drafts: list[int], forward: PartialForward) -> Draft | None:
        """The greedy chain in one call of the head's engine, which begins with the last unread column."""
        drafts = [count if alive else -1 for count, alive in zip(max_drafts, self.view.alive, strict=True)]
        if max(drafts) <= 0 or not (self.head.engine.supports_chains and self.sampler.uses_argmax_only):
            return None
        live = [row for row, count in enumerate(drafts) if count > 0]
        if older := {row: count - 1 for row in live if (count := self._num_unread(row)) > 1}:
            self._store_columns(older)
        tokens, states = self._take(dict.fromkeys(live, 1))
        inputs, index = self.chain_inputs(drafts, 1, None), on_device(live, self.head.device)
        inputs.roots = tokens.new_zeros(self.view.rows).index_copy(0, index, tokens)
        inputs.states = states.new_zeros((self.view.rows, states.shape[1])).index_copy(0, index, states)
        inputs.bases = [length if row in live else 0 for row, length in enumerate(self.store.length)]
        inputs.extent, inputs.columns = max(map(sum, zip(inputs.bases, max_drafts, strict=True))) + 1, max(drafts) + 1
        self.store.reserve(inputs.extent)
        chain = self.head.chain(inputs, self.store)
        for row in live:
            self.store.length[row] += 1
        return self.finish_call(chain, forward)
