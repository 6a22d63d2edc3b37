"""The tokens of one step, each with the number of layers that it has passed."""

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipstone.engines.engine import ChainInputs, ChainOutputs
from skipstone.engines.host_transfer import cached_arange, on_device
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.passes import Pass, SkipSet, Tree, ancestors
from skipstone.utils.cached_property import cached_property

COUNTED = 4096  # minimum size of the shared ranges of numbers, so that few steps need larger ones


class PartialForward:
    """The tokens of one step and their hidden states, each at its own depth.

    Column 0 is the last committed token of every row, further columns are draft tokens. Column c of a row writes the slot
    base + c of the KV store. On a chain its position is the same number. In a tree it is base + its depth in the tree.

    alive: rows that take part; all columns of the others are invalid. max_drafts: maximum number of draft tokens per row. base:
    number of committed tokens per row, 0 for an inactive row. top: number of layers that `finish` runs. width: number of
    columns so far. valid: [B, n] bool, None if every column is valid. parents: of a tree, as in `append`, None for a chain.
    passes: (from layer, to layer, columns) of all passes so far. shortlist: [S] int64, the ids that drafts are limited to, None
    for all. drafter: runs `draft_greedily` and `sketched_logits`, the same layers in fewer bits; None for the model.
    feature_depths: numbers of layers; `features` are the states after each of them.
    """

    def __init__(
        self,
        model: ModelRunner,
        store: KVCache,
        root: Tensor,
        alive: list[bool],
        max_drafts: list[int],
        shortlist: Tensor | None = None,
        drafter: ModelRunner | None = None,
        feature_depths: tuple[int, ...] = (),
    ) -> None:
        self.model, self.store, self.shortlist = model, store, shortlist
        self.drafter, self.feature_depths = drafter or model, feature_depths
        self._recorded: dict[int, Tensor] = {}  # number of layers -> states of all columns after them, [B, max. columns, d]
        self.rows, self.device = root.shape[0], root.device
        self.top = store.layers
        self.base = [length if live else 0 for length, live in zip(store.length, alive, strict=True)]
        self._highest_base = max(self.base)
        self._end = max(base + drafts + 1 for base, drafts, live in zip(self.base, max_drafts, alive, strict=True) if live)
        store.reserve(self._end)
        self._alive_rows = list(alive)
        self._all_alive = all(alive)
        self._uniform = self._all_alive and len(set(self.base)) == 1
        self._max_width = max(max_drafts) + 1
        if self._uniform:
            first = self._highest_base
            end = first + self._max_width
            places = cached_arange(max(COUNTED, 1 << (end - 1).bit_length()), self.device)
            self._slots = self._positions = places.as_strided((self.rows, self._max_width), (0, 1), first)
        else:
            # Rows with less room than others have superfluous columns. Their positions must not exceed the model's.
            self._slots = self._base + cached_arange(max(COUNTED, self._max_width), self.device)[: self._max_width]
            self._positions = self._slots.clamp(max=self._end - 1)
        self._reached: list[int] | None = [0]  # depth of every column, while it is the same in all rows
        self._depth: np.ndarray | None = None  # [B, columns] int64, depth of every token, once rows differ
        self._tokens = root[:, None]  # [B, columns]; `_extend_tokens` extends it for draft tokens
        self._hidden: Tensor | None = None  # [B, columns, d]
        self._embedded = 0  # number of embedded columns
        self.passes: list[tuple[int, int, int]] = []
        self.valid = None if self._all_alive else self._alive
        self.parents: Tensor | None = None
        self.width = 1

    @cached_property
    def _base(self) -> Tensor:
        """[B, 1] int64."""
        return on_device(self.base, self.device)[:, None]

    @cached_property
    def _alive(self) -> Tensor:
        """[B, 1] bool."""
        return on_device(self._alive_rows, self.device, torch.bool)[:, None]

    @property
    def tokens(self) -> Tensor:
        """[B, n] int64, n = `width` columns so far."""
        return self._tokens[:, : self.width]

    @property
    def positions(self) -> Tensor:
        """[B, n] int64."""
        return self._positions[:, : self.width]

    @property
    def depth(self) -> np.ndarray:
        """[B, n] int64 on the host, writable: number of layers that each token has passed."""
        if self._depth is None:
            self._depth = np.zeros((self.rows, self._max_width), dtype=np.int64)
        if self._reached is not None:
            self._depth[:, : self.width], self._reached = self._reached, None
        return self._depth[:, : self.width]

    @property
    def hidden(self) -> Tensor:
        """[B, n, d]: the state of every token at its depth."""
        if self._embedded < self.width:
            self._embed()
        assert self._hidden is not None
        return self._hidden if self._hidden.shape[1] == self.width else self._hidden[:, : self.width]

    def _embed(self) -> None:
        """Embed the newest columns."""
        start, stop = self._embedded, self.width
        entering = self.model.embed(self._tokens[:, start:stop], self._positions[:, start:stop])
        if self._hidden is None:
            if stop == self._max_width:
                self._hidden = entering
            else:
                self._hidden = entering.new_empty((self.rows, self._max_width, entering.shape[2]))
        if self._hidden is not entering:
            self._hidden[:, start:stop] = entering
        self._embedded = stop

    def append(self, tokens: Tensor, valid: Tensor | None = None, parents: Tensor | None = None) -> None:
        """Add columns at depth 0. tokens: [B, m] int64. valid: [B, m] bool, None for all.

        parents: [B, m] int64 over draft nodes, -1 for the root; None continues the chain. A tree comes in one call.
        """
        width = tokens.shape[1]
        start, stop = self.width, self.width + width
        assert self.parents is None, "nothing follows a tree"
        self._extend_tokens()
        if self._reached is not None:
            self._reached += [0] * width
        if parents is not None:
            assert start == 1, "a tree is appended in one piece, right after the root"
            self.parents, self._reach = parents, ancestors(parents)
            positions = self._base + self._reach.sum(-1) - 1
            last = min(self._end, self.model.max_positions) - 1  # nodes of a tree may be deeper than any text can become
            self._positions = positions.clamp(max=last)
        if valid is not None or self.valid is not None:
            new = torch.ones((self.rows, width), dtype=torch.bool, device=self.device) if valid is None else valid
            old = torch.ones((self.rows, start), dtype=torch.bool, device=self.device) if self.valid is None else self.valid
            self.valid = torch.cat([old, new if self._all_alive else new & self._alive], 1)
        self.width = stop
        self._tokens[:, start:stop] = tokens

    def _extend_tokens(self) -> None:
        """Move the root's tokens to a buffer with room for draft tokens."""
        if self._tokens.shape[1] < self._max_width:
            roots, self._tokens = self._tokens, self._tokens.new_empty((self.rows, self._max_width))
            self._tokens[:, :1] = roots

    def advance(self, to: int, rows: list[bool] | None = None) -> None:
        """Run every token through at least the first `to` layers, the shallowest tokens first. Others join at their own depth,
        so that each pass over layers takes all tokens that need it. rows: active rows, None for all that are alive."""
        same = rows is None and self._all_alive
        reached, alive = (self._reached if same else None) or [], np.array(self._alive_rows)
        depth: Any = None if reached else self.depth  # all rows have the same depths, or each has its own
        active = alive if rows is None else alive & rows
        levels = {level for level in (reached or depth[active].ravel().tolist()) if level < to}
        stops = {stop for stop in self.feature_depths if levels and min(levels) < stop < to}
        for low, high in pairwise([*sorted(levels | stops), to]):
            keep: Tensor | None = None
            if depth is None:
                columns = [column for column, level in enumerate(reached) if level <= low]
                for column in columns:
                    reached[column] = high
            else:
                running = (depth <= low) & active[:, None]  # [B, n]
                depth[running] = high
                columns = np.flatnonzero(running.any(0)).tolist()
                if not running[alive, columns[0] : columns[-1] + 1].all():  # states of inactive rows are never read
                    keep = on_device(running[:, columns].tolist(), self.device, torch.bool)
            self.passes.append((low, high, len(columns)))
            part = slice(columns[0], columns[-1] + 1)
            if keep is None and part.stop - part.start == len(columns):
                states = self._run(part, None, range(low, high))
                if len(columns) == self._max_width:
                    self._hidden = states
                else:
                    self.hidden[:, part] = states
                self._record(high, part, None, states)
            else:
                index = on_device(columns, self.device)
                states, hidden = self._run(index, keep, range(low, high)), self.hidden
                hidden[:, index] = states if keep is None else torch.where(keep[:, :, None], states, hidden[:, index])
                self._record(high, index, keep, states)

    def _record(self, depth: int, columns: slice | Tensor, keep: Tensor | None, states: Tensor) -> None:
        """Keep states [B, n, d] that columns have after some layers, if they are features."""
        if depth not in self.feature_depths:
            return
        if states.shape[1] == self._max_width and keep is None:
            self._recorded[depth] = states if depth == self.top else states.clone()  # later passes may write into it
            return
        if depth not in self._recorded:
            self._recorded[depth] = states.new_zeros((self.rows, self._max_width, states.shape[2]))
        recorded = self._recorded[depth]
        recorded[:, columns] = states if keep is None else torch.where(keep[:, :, None], states, recorded[:, columns])

    @property
    def features(self) -> Tensor:
        """[B, n, E * d]: the states of every token after all E feature depths, next to each other."""
        return torch.cat([self._recorded[depth][:, : self.width] for depth in self.feature_depths], -1)

    def _run(self, columns: slice | Tensor, keep: Tensor | None, layers: range) -> Tensor:
        return self.model.run(self.hidden[:, columns], self._pass(columns, keep), self.store, layers)

    def _pass(self, columns: slice | Tensor, keep: Tensor | None) -> Pass:
        valid = None if self.valid is None else self.valid[:, columns]
        if keep is not None:
            valid = keep if valid is None else valid & keep
        end, first_slot, tree = self._highest_base + self.width, None, None
        if self.parents is not None:
            tree = Tree(self._base.squeeze(1), self._reach[:, columns], self.positions)
        elif isinstance(columns, slice):
            end = self._highest_base + columns.stop
            first_slot = self._highest_base + columns.start if self._uniform and valid is None else None
        positions, slots = self._positions[:, columns], self._slots[:, columns]
        return Pass(positions, slots, valid, slice(0, self.rows), min(end, self._end), first_slot, tree)

    def draft_greedily(self, inputs: ChainInputs) -> ChainOutputs | None:
        """Append a greedy chain that the first `inputs.layers` layers draft, in one engine call.

        Returns None and changes nothing if no row drafts, if the engine has no such call, or if the model changes logits after
        the engine (a draft model maps them to its target's vocabulary). With `inputs.keep_states` all tokens have then passed
        the layers that drafted them, else they are at depth 0.
        """
        assert self.width == 1, "a chain starts at the root"
        assert not inputs.keep_states or self.drafter is self.model, "a token that another drafter ran has no state here"
        if any(depth < inputs.layers for depth in self.feature_depths):
            inputs.keep_states = False  # the call does not return the features
        if (chain := self._chain(self.drafter, inputs)) is None:
            return None
        width = 1 + chain.tokens.shape[1]
        self._extend_tokens()
        self._tokens[:, 1:width] = chain.tokens
        self.width = width
        if self.drafter is self.model:  # the embeddings of another drafter are rounded, too
            self._hidden, self._embedded = chain.states, width
        if min(chain.counts) < width - 1:
            counts = on_device(chain.counts, self.device)[:, None]
            self.valid = cached_arange(max(COUNTED, width), self.device)[:width] <= counts
            if not self._all_alive:
                self.valid &= self._alive
        self.passes += [(0, inputs.layers, 1)] * (width - 1 + inputs.keep_states)
        self._reached = [inputs.layers if inputs.keep_states else 0] * width
        if inputs.keep_states:
            self._record(inputs.layers, slice(0, width), None, self.hidden)
        return chain

    def draft_with_all_layers(self, inputs: ChainInputs) -> ChainOutputs | None:
        """Greedy tokens of the whole model after the newest column, in one engine call: the drafts of a draft model.

        The model has then read all of them but the last one of each row. This forward cannot be used afterwards. Returns None
        and changes nothing where `draft_greedily` does.
        """
        inputs.layers = self.top
        return self._chain(self.model, inputs)

    def _chain(self, drafter: ModelRunner, inputs: ChainInputs) -> ChainOutputs | None:
        """A greedy chain after the newest column, or None. All earlier columns run through the whole model first."""
        limits = [count if live else -1 for count, live in zip(inputs.max_drafts, self._alive_rows, strict=True)]
        if max(limits) <= 0 or not (drafter.uses_engine_argmax and drafter.engine.supports_chains):
            return None
        before = self.width - 1
        if before:
            self._run(slice(0, before), None, range(self.top))
        inputs.max_drafts, inputs.shortlist = limits, self.shortlist
        inputs.roots, inputs.bases = self._tokens[:, before], [base + before for base in self.base]
        inputs.extent, inputs.columns = self._end, max(self._max_width, max(limits) + 1)
        return drafter.chain(inputs, self.store)

    def exit_logits(self, exit_layer: int) -> Tensor:
        """Logits of the newest column after E layers [B, V] float32, -inf outside of the shortlist. Its state stays at depth E
        for `finish`."""
        self.advance(exit_layer)
        return self.model.logits(self.hidden[:, -1:], self.shortlist)[:, 0]

    def sketched_logits(self, skip: SkipSet) -> Tensor:
        """Logits of the newest column [B, V] float32 by the model without some sublayers, -inf outside of the shortlist.

        Every token stays at depth 0. The scoring pass overwrites the keys and values that this writes.
        """
        newest = slice(self.width - 1, self.width)
        at = self._pass(newest, None)
        if self.drafter is self.model:
            entering = self.hidden[:, newest]
        else:
            entering = self.drafter.embed(self._tokens[:, newest], self._positions[:, newest])
        states = self.drafter.run(entering, at, self.store, range(self.top), skip)
        return self.drafter.logits(states, self.shortlist)[:, 0]

    def restart(self) -> None:
        """Reset every token to depth 0 (LayerSkip's ablation without cache reuse)."""
        self._embedded, self._reached = 0, [0] * self.width

    @property
    def last_states(self) -> Tensor:
        """The state of every row's last valid token, [B, 1, d]; arbitrary for inactive rows."""
        if self.valid is None:
            return self.hidden[:, -1:]
        last = self.valid.sum(1).clamp_min(1) - 1
        return self.hidden.take_along_dim(last[:, None, None], 1)

    def finish(self) -> Tensor:
        """The scoring pass: run every token through all layers. Returns raw logits [B, n+1, V] float32."""
        self.advance(self.top)
        return self.model.logits(self.hidden)

    def greedy_tokens(self) -> Tensor:
        """As `finish`, but returns only the greedy token of every column, [B, n+1] int64."""
        self.advance(self.top)
        return self.model.greedy_tokens(self.hidden)
