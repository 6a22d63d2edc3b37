"""A Hugging Face decoder, layer by layer. `LayeredModel.run` is the only caller of its layers."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skipstone.models.facts import Facts
from skipstone.models.kvstore import KVStore
from skipstone.models.memo import Memo
from skipstone.models.modules import DecoderModules, unwrapped
from skipstone.models.passes import Pass, SkipSet
from skipstone.models.patches import Running
from skipstone.models.refusals import refuse_state

_FACTS: Memo[Facts] = Memo()
_NOTHING = SkipSet()


class LayeredModel(DecoderModules):
    """The facts and modules of one model. ValueError for a model that skipstone cannot decode exactly.

    Making one is cheap: what has to be searched for is found once per model, and again after its modules, its config, or the
    places and dtypes of its weights have changed. One thread at a time may use a model; a server owns its model.

    model: the transformers model. decoder: that without its head. head: the LM head. layers: the decoder layers. kinds: their
    layer types. windows: their sliding windows in tokens, None for full attention. embeddings: ids that have an embedding.
    max_positions: most positions of a sequence; max_positions_source: the config field that says so.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        inner = unwrapped(model)
        refuse_state(model, inner)
        facts = _FACTS.get(inner, None, lambda: Facts(inner), lambda known: known.hold(inner))
        self.model, self.config, self._facts = inner, inner.config, facts
        self.family, self.decoder, self.head = facts.family, facts.decoder, facts.head
        self.layers, self.kinds, self.windows = facts.layers, facts.kinds, facts.windows
        self.max_positions, self.max_positions_source = facts.max_positions, facts.max_positions_source
        self.embeddings, self.device, self.dtype = facts.embeddings, facts.device, facts.dtype
        self._fixed = dict(facts.family.arguments)
        self._phases = facts.phases

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, n] ids and positions -> [B, n, d], the states that enter layer 0."""
        return self.family.embed(self.decoder, self.config, tokens, positions)

    def project(self, normed: Tensor, head: nn.Module | None = None) -> Tensor:
        """LM head and what the family does after it. [B, n, d'] -> [B, n, V] float32. head: instead of the model's own."""
        running = self._patched()
        try:
            running.passing = True
            scores = (self.head if head is None else head)(normed)
        finally:
            running.passing = False
        return self.family.logits(scores, self.config).float()

    def run(self, hidden: Tensor, at: Pass, store: KVStore, layers: range, skip: SkipSet | None = None) -> Tensor:
        """Run layers over [b, n, d], writing keys and values to the pass's slots. Returns [b, n, d].

        skip: sublayers that add nothing to the residual stream in this pass.
        """
        facts, cache = self._facts, {self.family.cache_argument: store.view(at)}
        # layers without both sublayers hand on their input, but for a post-norm model's (OPT-350m), whose norms follow the sum
        absent = skip.attention & skip.mlp if skip and not self.family.post_norm(self.config) else frozenset()
        phases = self._position_embeddings(hidden, at, layers)
        running = self._patched(skip)
        try:
            running.passing = True
            for index in layers:
                if index in absent:
                    continue
                output = self.layers[index](
                    hidden,
                    attention_mask=at.mask(self.windows[index], facts.form, facts.groups[index]),
                    position_ids=at.positions,
                    position_embeddings=phases[self.kinds[index]],
                    **cache,
                    **self._fixed,
                )
                hidden = output[0] if isinstance(output, tuple) else output
        finally:
            running.passing = False
        return hidden

    def _patched(self, skip: SkipSet | None = None) -> Running:
        """What the model's patches look at, ready for a pass. RuntimeError in the middle of another pass."""
        running = self._facts.running
        if running.passing:
            raise RuntimeError(
                f"this {type(self.model).__name__} is in the middle of another pass: one thread at a time may use a model; let "
                "one thread own it, or give each thread a copy"
            )
        if not running.on:
            self._facts.patch()
        if skip and not running.skippable:
            self._facts.patch_sublayers()
        running.skip = skip or _NOTHING
        return running

    def _position_embeddings(self, hidden: Tensor, at: Pass, layers: range) -> dict[str, Any]:
        if self.family.rotary is None:
            return dict.fromkeys(self.kinds)
        used = {self.kinds[index] for index in layers}
        if not self.family.rotary_by_kind:
            return dict.fromkeys(used, self._rotary("", hidden, at))
        return {kind: self._rotary(kind, hidden, at) for kind in used}

    def _rotary(self, kind: str, hidden: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        """cos and sin of the pass's positions, [b, n, rotary_dim] each, from a table that grows with the positions."""
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
        if at.first_slot is not None and at.tree is None:
            span = slice(at.first_slot, at.first_slot + at.shape[1])
            return table[0][None, span], table[1][None, span]
        return table[0][at.positions], table[1][at.positions]
