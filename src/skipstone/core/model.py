"""A Hugging Face decoder, layer by layer: `LayeredModel.run` is the only caller of its layers, `Frontier` holds tokens on their
way up the stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skipstone.core import attention, linear
from skipstone.core.families import family_of, kinds, max_positions, windows
from skipstone.core.host import on_device
from skipstone.core.kvstore import KVStore, MaskForm, Pass, Tree, ancestors
from skipstone.core.refusals import refuse_state
from skipstone.core.skipping import SkipSet, instead, no_attention, unchanged


def unwrapped(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper (its adapters live in the layers), or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


class LayeredModel:
    """The facts and modules of one model. ValueError for a model that skipstone cannot decode exactly."""

    def __init__(self, model: PreTrainedModel) -> None:
        wrapper: Any = model
        inner = unwrapped(model)
        refuse_state(wrapper, inner)
        self.model, self.config = inner, inner.config
        self.family = family_of(inner)
        self.decoder: Any = inner.get_decoder()
        self.layers = list(getattr(self.decoder, self.family.layers))[: self.config.num_hidden_layers]
        self.head: Any = inner.get_output_embeddings()
        self.kinds = kinds(self.config)
        self.windows = windows(self.config, self.kinds)
        self.max_positions, self.max_positions_source = max_positions(self.config)
        self.device, self.dtype = inner.device, inner.dtype
        sdpa = attention.implementation(self.config) == "sdpa"
        self._own_attention = sdpa and self.family.attention_interface
        self._form = MaskForm(torch.bool if sdpa and not self._own_attention else self.dtype, self._own_attention)
        sublayers = [getattr(layer, self.family.attention) for layer in self.layers]
        self._groups = [getattr(s, "num_key_value_groups", 1) if self._own_attention else 1 for s in sublayers]
        self._attention_config = getattr(sublayers[0], "config", self.config)
        self.embeddings: int = inner.get_input_embeddings().weight.shape[0]
        self._linears = [linear.replacements(layer) for layer in self.layers]
        self._head_linear = linear.replacements(self.head)
        self._fixed = dict(self.family.arguments)
        self._phases: dict[str, tuple[Tensor, Tensor]] = {}

    @property
    def depth(self) -> int:
        """Number of layers, L."""
        return len(self.layers)

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, n] ids and positions -> [B, n, d], the states that enter layer 0."""
        return self.family.embed(self.decoder, self.config, tokens, positions)

    def logits(self, hidden: Tensor) -> Tensor:
        """g(.): final norm, LM head and what the family does after it. [B, n, d] -> [B, n, V] float32."""
        return self.project(self.normed(hidden))

    def normed(self, hidden: Tensor) -> Tensor:
        """What the LM head reads: states after the final norm (and OPT-350m's projection). [B, n, d] -> [B, n, d']."""
        return self.family.finish(self.decoder, hidden)

    def project(self, normed: Tensor, head: nn.Module | None = None) -> Tensor:
        """LM head and what the family does after it. [B, n, d'] -> [B, n, V] float32. head: instead of the model's own."""
        with linear.in_use(self._head_linear):
            scores = (self.head if head is None else head)(normed)
        return self.family.logits(scores, self.config).float()

    def run(self, hidden: Tensor, at: Pass, store: KVStore, layers: range, skip: SkipSet | None = None) -> Tensor:
        """Run layers over [b, n, d], writing keys and values to the pass's slots. Returns [b, n, d]."""
        cache = {self.family.cache_argument: store.view(at)}
        absent = self._absent(skip) if skip else frozenset()
        phases = self._position_embeddings(hidden, at, layers)
        attending = attention.in_use(self._attention_config) if self._own_attention else nullcontext()
        few = layers if hidden.shape[0] * hidden.shape[1] <= linear.FEW_ROWS else range(0)
        linears = [pair for index in few for pair in self._linears[index]]
        with attending, linear.in_use(linears), self.skipping(skip) if skip else nullcontext():
            for index in layers:
                if index in absent:
                    continue
                output = self.layers[index](
                    hidden,
                    attention_mask=at.mask(self.windows[index], self._form, self._groups[index]),
                    position_ids=at.positions,
                    position_embeddings=phases[self.kinds[index]],
                    **cache,
                    **self._fixed,
                )
                hidden = output[0] if isinstance(output, tuple) else output
        return hidden

    def _position_embeddings(self, hidden: Tensor, at: Pass, layers: range) -> dict[str, Any]:
        if self.family.rotary is None:
            return dict.fromkeys(self.kinds)
        used = {self.kinds[index] for index in layers}
        if not self.family.rotary_by_kind:
            return dict.fromkeys(used, self._rotary("", hidden, at))
        return {kind: self._rotary(kind, hidden, at) for kind in used}

    def _rotary(self, kind: str, hidden: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        """cos and sin of the pass's positions [b, n, rotary_dim], looked up in a table made once."""
        table = self._phases.get(kind)
        needed = min(max(at.extent, 1), self.max_positions)
        if table is None or table[0].shape[0] < needed:
            size = min(self.max_positions, max(256, 1 << (needed - 1).bit_length()))
            position = torch.arange(size, device=hidden.device)[None]
            rotary = getattr(self.decoder, str(self.family.rotary))
            extra = (kind,) if kind else ()
            rotary(hidden, position[:, :1], *extra)  # dynamic RoPE forgets the longer sequences it may have seen
            cos, sin = rotary(hidden, position, *extra)
            table = self._phases[kind] = (cos[0], sin[0])
        if at.start is not None and at.tree is None:
            span = slice(at.start, at.start + at.shape[1])
            return table[0][None, span], table[1][None, span]
        return table[0][at.positions], table[1][at.positions]

    def _absent(self, skip: SkipSet) -> frozenset[int]:
        """Layers that are their input where both sublayers are left out; none of a post-norm model (OPT-350m)."""
        return frozenset() if self.family.post_norm(self.config) else skip.attention & skip.mlp

    @contextmanager
    def skipping(self, skip: SkipSet) -> Iterator[None]:
        """Make the sublayers of a skip set add nothing to the residual stream, in this thread."""
        forwards: dict[nn.Module, Any] = {}
        absent = self._absent(skip)
        for index in skip.attention - absent:
            forwards[getattr(self.layers[index], self.family.attention)] = no_attention
        for index in skip.mlp - absent:
            *before, last = (getattr(self.layers[index], name) for name in self.family.mlp)
            forwards |= dict.fromkeys(before, unchanged) | {last: torch.zeros_like}
        with instead(forwards):
            yield


class Frontier:
    """Tokens on their way up the stack, one step's worth.

    Column 0 is the last committed token of every row, further columns are draft tokens. Slot of column c = base + c; position
    the same on a chain, base + tree depth in a tree. `depth` [B, n] (host) says how many layers a token has been through.
    alive: rows taking part; the others are invalid throughout. most: draft tokens each row has room for. top: the layer that
    `finish` goes up to. passes: what was run so far, (from layer, to layer, columns).
    """

    def __init__(self, model: LayeredModel, store: KVStore, root: Tensor, alive: list[bool], most: list[int]) -> None:
        self.model, self.store = model, store
        self.rows, self.device = root.shape[0], root.device
        self.top = store.layers
        self.base = [length if live else 0 for length, live in zip(store.length, alive, strict=True)]
        self._start = max(self.base)
        self._end = max(base + room + 1 for base, room, live in zip(self.base, most, alive, strict=True) if live)
        store.reserve(self._end)
        self._uniform = all(alive) and len(set(self.base)) == 1
        self._alive = None if all(alive) else on_device(alive, self.device)[:, None]
        self._taking = np.array(alive)
        room = max(most) + 1
        self._base = on_device(self.base, self.device)[:, None]
        self._slots = self._base + torch.arange(room, device=self.device)
        # a row with less room than others must not name positions that the model does not have
        self._positions = self._slots if self._uniform else self._slots.clamp(max=self._end - 1)
        self._tokens = root.new_empty((self.rows, room))
        self._depth = np.zeros((self.rows, room), dtype=np.int64)
        self._hidden: Tensor | None = None
        self.passes: list[tuple[int, int, int]] = []
        self.valid: Tensor | None = None
        self.parents: Tensor | None = None
        self.width = 0
        self.append(root[:, None])

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
        """[B, n] on the host: layers that each token has been through."""
        return self._depth[:, : self.width]

    @property
    def hidden(self) -> Tensor:
        """[B, n, d]: the state of every token at its depth."""
        assert self._hidden is not None
        return self._hidden[:, : self.width]

    def append(self, tokens: Tensor, valid: Tensor | None = None, parents: Tensor | None = None) -> None:
        """Add columns at depth 0. tokens: [B, m] int64. valid: [B, m] bool, None for all.

        parents: [B, m] int64 over draft nodes, -1 for the root; None continues the chain. A tree comes in one call.
        """
        start, stop = self.width, self.width + tokens.shape[1]
        assert self.parents is None, "nothing follows a tree"
        if parents is not None:
            assert start == 1, "a tree is appended in one piece, right after the root"
            self.parents, self._reach = parents, ancestors(parents)
            positions = self._base + self._reach.sum(-1) - 1
            last = min(self._end, self.model.max_positions) - 1  # nor nodes that nobody may accept
            self._positions = positions.clamp(max=last)
        if valid is not None or self.valid is not None or self._alive is not None:
            self._extend_valid(start, stop - start, valid)
        self.width = stop
        self._tokens[:, start:stop] = tokens
        entering = self.model.embed(tokens, self._positions[:, start:stop])
        if self._hidden is None:
            self._hidden = entering.new_empty((self.rows, self._tokens.shape[1], entering.shape[2]))
        self._hidden[:, start:stop] = entering

    def _extend_valid(self, start: int, width: int, valid: Tensor | None) -> None:
        new = torch.ones((self.rows, width), dtype=torch.bool, device=self.device) if valid is None else valid
        new = new if self._alive is None else new & self._alive
        old = self.valid
        if old is None:
            old = torch.ones((self.rows, start), dtype=torch.bool, device=self.device)
        self.valid = torch.cat([old, new], 1)

    def advance(self, to: int, rows: list[bool] | None = None) -> None:
        """Run every token that is not `to` layers deep yet; deeper ones join where they wait. rows: that take part, None for
        all that are alive."""
        depth, hidden = self.depth, self.hidden
        taking = self._taking if rows is None else self._taking & rows
        levels = sorted(level for level in set(depth[taking].ravel().tolist()) if level < to)
        for low, high in pairwise([*levels, to]):
            running = (depth <= low) & taking[:, None]
            columns = np.flatnonzero(running.any(0))
            first, last = int(columns[0]), int(columns[-1]) + 1
            self.passes.append((low, high, len(columns)))
            if running[self._taking, first:last].all():  # what becomes of rows that are not alive does not matter
                part = slice(first, last)
                hidden[:, part] = self._run(part, None, range(low, high))
            else:
                index = on_device(columns.tolist(), self.device)
                keep = on_device(running[:, columns].tolist(), self.device)
                new = self._run(index, keep, range(low, high))
                hidden[:, index] = torch.where(keep[:, :, None], new, hidden[:, index])
            depth[running] = high

    def _run(self, columns: slice | Tensor, keep: Tensor | None, layers: range) -> Tensor:
        return self.model.run(self.hidden[:, columns], self._pass(columns, keep), self.store, layers)

    def _pass(self, columns: slice | Tensor, keep: Tensor | None) -> Pass:
        valid = None if self.valid is None else self.valid[:, columns]
        if keep is not None:
            valid = keep if valid is None else valid & keep
        positions, slots, rows = self._positions[:, columns], self._slots[:, columns], slice(0, self.rows)
        if self.parents is not None:
            tree = Tree(self._base.squeeze(1), self._reach[:, columns], self.positions)
            return Pass(positions, slots, valid, rows, min(self._start + self.width, self._end), tree=tree)
        if not isinstance(columns, slice):
            return Pass(positions, slots, valid, rows, min(self._start + self.width, self._end))
        start = self._start + columns.start if self._uniform and valid is None else None
        return Pass(positions, slots, valid, rows, min(self._start + columns.stop, self._end), start)

    def exit_logits(self, exit_layer: int) -> Tensor:
        """g(x_E) of the newest column [B, V] float32, after bringing it to depth E. The states stay for `finish`."""
        self.advance(exit_layer)
        return self.model.logits(self.hidden[:, -1:])[:, 0]

    def sketched_logits(self, skip: SkipSet) -> Tensor:
        """Logits of the newest column [B, V] float32 through what a skip set leaves of the model. Every token stays at depth 0:
        the keys and values that this writes lie in the column's own slots and are overwritten by the scoring pass."""
        newest = slice(self.width - 1, self.width)
        at = self._pass(newest, None)
        return self.model.logits(self.model.run(self.hidden[:, newest], at, self.store, range(self.top), skip))[:, 0]

    def restart(self) -> None:
        """Forget the exit states: every token is at depth 0 again (LayerSkip's ablation without cache reuse)."""
        self.hidden[:] = self.model.embed(self.tokens, self.positions)
        self.depth[:] = 0

    def finish(self) -> Tensor:
        """The scoring pass: bring every token to the top. Returns raw logits [B, n+1, V] float32."""
        self.advance(self.top)
        return self.model.logits(self.hidden)
