"""The engine that calls transformers' own modules, layer by layer. `EagerEngine.run` is the only caller of the layers."""

from typing import Any

import torch
from torch import Tensor, nn

from skipstone.models.engines.eager import patches
from skipstone.models.engines.engine import ChainEnd, ChainStart, Warps
from skipstone.models.engines.rotary import RotaryTables
from skipstone.models.facts import Facts
from skipstone.models.kvstore import KVStore
from skipstone.models.packed import is_packed
from skipstone.models.passes import MaskForm, Pass, SkipSet

_NOTHING = SkipSet()


class EagerEngine:
    """Runs the modules of a model, with what `patches` puts on them. It runs every model that skipstone decodes at all."""

    name = "eager"
    row_exact = False
    chains = False
    draws = False
    own_threads = False
    quantize: str | None = None

    def __init__(self, model: Any, facts: Facts) -> None:
        self.dtype: torch.dtype = facts.dtype
        slow = ", slow: its weights are unpacked whenever they are read" if is_packed(model) else ""
        self.detail = f"transformers' own modules, {facts.dtype}, {facts.places}{slow}"
        self._home = facts.device
        self.family, self.config, self.decoder, self.head = facts.family, model.config, facts.decoder, facts.head
        self.layers, self.kinds, self.windows = facts.layers, facts.kinds, facts.windows
        self._type = type(model).__name__
        self._fixed = dict(facts.family.arguments)
        self._rotary = RotaryTables(facts.decoder, facts.family, facts.max_positions)
        sdpa = model.config._attn_implementation == "sdpa"
        own = sdpa and self.family.attention_interface
        attentions: list[nn.Module] = [getattr(layer, self.family.attention) for layer in self.layers]
        self._attentions = attentions if own else []
        # query heads per key/value head, of every layer whose attention packs them
        self._groups: list[Any] = [getattr(one, "num_key_value_groups", 1) if own else 1 for one in attentions]
        self._form = MaskForm(torch.bool if sdpa and not own else self.dtype, own)
        self._running = patches.Running()
        patches.take_off(model)  # those of the model that this one is a copy of, or of an earlier state
        self._patch()

    def holds(self) -> bool:
        """Always: the modules are the model's own."""
        return True

    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, n] ids and positions -> [B, n, d], the states that enter layer 0."""
        return self.family.embed(self.decoder, self.config, tokens, positions).to(self._home)

    def run(self, hidden: Tensor, at: Pass, store: KVStore, layers: range, skip: SkipSet | None = None) -> Tensor:
        """Run layers over [b, n, d], writing keys and values to the pass's slots. Returns [b, n, d].

        skip: sublayers that add nothing to the residual stream in this pass.
        """
        cache = {self.family.cache_argument: store.view(at)}
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
                    attention_mask=at.mask(self.windows[index], self._form, self._groups[index]),
                    position_ids=at.positions,
                    position_embeddings=phases[self.kinds[index]],
                    **cache,
                    **self._fixed,
                )
                hidden = output[0] if isinstance(output, tuple) else output
        finally:
            running.passing = False
        return hidden.to(self._home)  # from where the last layer is; accelerate's hooks bring it to each of them

    def normed(self, hidden: Tensor) -> Tensor:
        """What the LM head reads: states after the final norm (and OPT-350m's projection). [..., d] -> [..., d']."""
        return self.family.finish(self.decoder, hidden).to(self._home)

    def likeliest(self, hidden: Tensor) -> Tensor:
        """As in `Engine`."""
        return self.project(self.normed(hidden)).argmax(-1)

    def exit_picks(self, hidden: Tensor, transform: Tensor | None) -> tuple[Tensor, Tensor]:
        """Never asked for: `chains` is False."""
        raise NotImplementedError

    def draw(self, logits: Tensor, warps: Warps, counters: Tensor) -> Tensor | None:
        """Never asked for: `draws` is False."""
        raise NotImplementedError

    def chain(self, start: ChainStart, store: KVStore) -> ChainEnd:
        """Never asked for: `chains` is False."""
        raise NotImplementedError("transformers' modules are called one by one")

    def project(self, normed: Tensor, head: nn.Module | None = None) -> Tensor:
        """LM head and what the family does after it. [..., d'] -> [..., V] float32. head: instead of the model's own."""
        running = self._patched()
        try:
            running.passing = True
            scores = (self.head if head is None else head)(normed)
        finally:
            running.passing = False
        return self.family.logits(scores.to(self._home), self.config).float()

    def _patched(self, skip: SkipSet | None = None) -> patches.Running:
        """What the model's patches look at, ready for a pass. RuntimeError in the middle of another pass."""
        running = self._running
        if running.passing:
            raise RuntimeError(
                f"this {self._type} is in the middle of another pass: one thread at a time may use a model; let one thread own "
                "it, or give each thread a copy"
            )
        if not running.on:
            self._patch()
        if skip and not running.skippable:
            self._patch_sublayers()
        running.skip = skip or _NOTHING
        return running

    def _patch(self) -> None:
        """Put on what every pass wants."""
        patches.put_on([*self.layers, self.head], self._attentions, self._running)

    def _patch_sublayers(self) -> None:
        """Put on what passes with a skip set want."""
        for index, layer in enumerate(self.layers):
            patches.cover(getattr(layer, self.family.attention), patches.Skippable, self._running, "attention", index)
            *before, last = (getattr(layer, name) for name in self.family.mlp)
            for module in before:
                patches.cover(module, patches.Skippable, self._running, "before", index)
            patches.cover(last, patches.Skippable, self._running, "mlp", index)
        self._running.skippable = True

    def _position_embeddings(self, hidden: Tensor, at: Pass, layers: range) -> dict[str, Any]:
        if self.family.rotary is None:
            return dict.fromkeys(self.kinds)
        used = {self.kinds[index] for index in layers}
        if not self.family.rotary_by_kind:
            return dict.fromkeys(used, self._phases("", hidden, at))
        return {kind: self._phases(kind, hidden, at) for kind in used}

    def _phases(self, kind: str, hidden: Tensor, at: Pass) -> tuple[Tensor, Tensor]:
        """cos and sin of the pass's positions, [b, n, rotary_dim] each."""
        table = self._rotary.table(kind, at.extent, hidden)
        if at.first_slot is not None and at.tree is None:
            span = slice(at.first_slot, at.first_slot + at.shape[1])
            return table[0][None, span], table[1][None, span]
        return table[0][at.positions], table[1][at.positions]
