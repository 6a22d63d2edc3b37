"""A Hugging Face decoder, layer by layer: `LayeredModel.run` is the only caller of its layers, `Frontier` holds tokens on their
way up the stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skipstone.models import attention, linear
from skipstone.models.families import kinds, max_positions, windows
from skipstone.models.kvstore import KVStore
from skipstone.models.modules import DecoderModules, unwrapped
from skipstone.models.passes import MaskForm, Pass
from skipstone.models.refusals import refuse_state
from skipstone.models.skipping import SkipSet, instead, no_attention, unchanged


class LayeredModel(DecoderModules):
    """The facts and modules of one model. ValueError for a model that skipstone cannot decode exactly."""

    def __init__(self, model: PreTrainedModel) -> None:
        inner = unwrapped(model)
        refuse_state(model, inner)
        super().__init__(inner)
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

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, n] ids and positions -> [B, n, d], the states that enter layer 0."""
        return self.family.embed(self.decoder, self.config, tokens, positions)

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
