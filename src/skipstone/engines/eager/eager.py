"""The engine that calls transformers' own modules, layer by layer. Only `EagerEngine.run` calls layers."""

from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers.modeling_utils import AttentionInterface

from skipstone.engines import greedy_tokens, host_transfer
from skipstone.engines.eager import attention, linear, patches
from skipstone.engines.engine import Engine
from skipstone.engines.kv_cache import KVCache, SharedKVView
from skipstone.engines.rotary import RotaryTables
from skipstone.models.decoder_model import DecoderModel
from skipstone.models.families import PER_LAYER, SHARED, RotarySource, alibi_slopes, submodule, text_config
from skipstone.models.packed_weight import is_packed
from skipstone.models.passes import MaskForm, Pass, SkipSet
from skipstone.models.torch_defaults import stable_defaults
from skipstone.models.weight_version import TensorValues

_NOTHING = SkipSet()
AttentionInterface.register(attention.NAME, attention.attend)


class EagerEngine(Engine):
    """Runs a model's modules with the patches of `patches`. It supports every model that skipstone decodes."""

    name = "eager"

    def __init__(self, model: Any, description: DecoderModel) -> None:
        self.dtype: torch.dtype = description.weight_dtype
        slow = ", slow: its weights are unpacked whenever they are read" if is_packed(model) else ""
        spread = "" if description.spread is None else f", weights {description.spread}"
        self.detail = f"transformers' own modules, {description.weight_dtype}, {description.device}{spread}{slow}"
        self._home = description.device
        self.family, self.config = description.family, text_config(model)
        self.decoder, self.head = description.decoder, description.head
        self.layers, self.reaches = description.layers, description.reaches
        self._type = type(model).__name__
        self._fixed = dict(description.family.arguments)
        self._rotary = RotaryTables(description.decoder, description.max_positions)
        sdpa = self.config._attn_implementation == "sdpa"
        uses_attention = sdpa and self.family.attention_interface
        mixers: list[nn.Module] = [getattr(layer, self.family.mixer(index)) for index, layer in enumerate(self.layers)]
        attentions = [one for index, one in enumerate(mixers) if not self.family.recurs(index)]
        self._recurrent = [(index, one) for index, one in enumerate(mixers) if self.family.recurs(index)]
        self._attentions = attentions if uses_attention else []
        mask_path = self.family.mask_buffer_path
        self._masking = [] if mask_path is None else [submodule(one, mask_path) for one in attentions]
        # query heads per key/value head of every layer that uses our attention
        self._groups: list[Any] = [getattr(one, "num_key_value_groups", 1) if uses_attention else 1 for one in mixers]
        added = uses_attention or self.family.float_masks or not (sdpa or self.family.hiding_masks)
        self._form = MaskForm(self.dtype if added else torch.bool, uses_attention, self.family.hiding_masks)
        self._slopes = alibi_slopes(self.config.num_attention_heads, description.device) if self.family.alibi else None
        self._shortlists: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # ids -> (values of the head, rows of it)
        self._running = patches.PatchContext()
        patches.take_off(model)  # of an earlier state, or of the model that this one was copied from
        self._patch()

    def is_current(self, version: int | None) -> bool:
        """True, always: the modules are the model's own."""
        self._rotary.is_current()
        return True

    @stable_defaults()
    def embed(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """As in `Engine`."""
        return self.family.embed(self.decoder, self.config, tokens, positions).to(self._home)

    @stable_defaults()
    def run(self, hidden: Tensor, at: Pass, store: KVCache, layers: range, skip: SkipSet | None = None) -> Tensor:
        """As in `Engine`."""
        if self._recurrent and (skip or at.tree is not None):
            raise ValueError(f"the recurrent states of this {self._type} go along chains that all layers of a pass run")
        if self.family.alibi == "position_bias" and at.tree is not None and len(hidden) > 1:
            rows = [self.run(hidden[row : row + 1], at.row(row), store, layers, skip) for row in range(len(hidden))]
            return torch.cat(rows)  # one bias serves all rows of a pass, but slots of trees differ in position between rows
        hidden, layer_inputs = self.family.parts(hidden, self.config)
        view = store.view(at, self.family.reads_cache_length)
        cache: dict[str, Any] = {self.family.cache_argument: view}
        if self.family.shares:
            cache[SHARED] = SharedKVView(view, dict(self.family.shares), self.dtype)
        # a layer without both sublayers returns its input, unless a norm or scale follows the sum (OPT-350m), or other layers
        # read its keys and values
        changing = self.family.post_norm or self.family.shares
        absent = skip.attention & skip.mlp if skip and not changing else frozenset()
        rotary = self.family.rotary
        phases = {source: self._phases(source, hidden, at) for source in {rotary[index] for index in layers}}
        running = self._patched(skip)
        try:
            running.thread = get_ident()
            for index in layers:
                if index not in absent:
                    given = self._layer_arguments(index, at, phases[rotary[index]])
                    if layer_inputs:
                        given[PER_LAYER] = layer_inputs[index]
                    output = self.layers[index](hidden, **given, **cache, **self._fixed)
                    hidden = output[0] if isinstance(output, (tuple, list)) else output
        finally:
            running.thread = None
        hidden = self.family.folded(hidden).to(self._home)  # accelerate's hooks move it between layers only
        return torch.cat([hidden, *layer_inputs], -1) if layer_inputs else hidden

    @stable_defaults()
    def normed(self, hidden: Tensor) -> Tensor:
        """As in `Engine`."""
        return self.family.finish(self.decoder, hidden).to(self._home)

    def greedy_tokens(self, hidden: Tensor) -> Tensor:
        """As in `Engine`."""
        return greedy_tokens.greedy_token(self.project(self.normed(hidden)))

    def top_k_tokens(self, logits: Tensor, count: int) -> Tensor:
        """As in `Engine`."""
        return greedy_tokens.top_k_tokens(logits, count)

    @stable_defaults()
    def project(self, normed: Tensor, head: nn.Module | None = None, shortlist: Tensor | None = None) -> Tensor:
        """As in `Engine`."""
        rows = None if shortlist is None or head is not None else self._rows_of_head(shortlist)
        running = self._patched()
        try:
            running.thread = get_ident()
            if rows is None:
                scores = (self.head if head is None else head)(normed)
            else:
                states = normed.to(rows.weight.device)
                scores = linear.few_rows(rows, states) if linear.pays(rows) else rows(states)
        finally:
            running.thread = None
        logits = self.family.scored(scores.to(self._home), self.config).float()
        return logits if shortlist is None or rows is not None else logits[..., shortlist]

    def _rows_of_head(self, shortlist: Tensor) -> nn.Linear | None:
        """Some rows of the LM head, copied again after the head changes. On the CPU the first rows are a view instead.

        None if the head does more than multiply by a plain matrix.
        """
        if not patches.is_plain(self.head):
            return None
        weight, bias = self.head.weight, self.head.bias
        parts = [weight] if bias is None else [weight, bias]
        cached = self._shortlists.get(shortlist)
        if cached is None or not cached[0].are_in(parts):
            ids = shortlist.to(weight.device)
            first = host_transfer.is_on_host(ids) and torch.equal(ids, torch.arange(len(ids), dtype=torch.int64, device="cpu"))
            cached = self._shortlists[shortlist] = TensorValues(parts), _rows(weight, bias, slice(len(ids)) if first else ids)
        return cached[1]

    def _patched(self, skip: SkipSet | None = None) -> patches.PatchContext:
        """The patches of a pass, put on. They act in the thread that the caller names, without a call in between that Ctrl-C
        could interrupt. RuntimeError in the middle of another pass."""
        running = self._running
        if running.passing:
            raise RuntimeError(
                f"this {self._type} is in the middle of a pass: a hook or other code inside a pass cannot start another one"
            )
        if not running.on:
            self._patch()
        if skip and not running.skippable:
            self._patch_sublayers()
        running.skip = skip or _NOTHING
        return running

    def _patch(self) -> None:
        """Put on the patches that every pass needs."""
        patches.put_on([*self.layers, self.head], self._attentions, self._running)
        for module in self._masking:
            patches.cover(module, patches.MaskPatch, self._running, "bias")
        for index, sublayer in self._recurrent:
            patches.cover(sublayer, patches.RecurrentPatch, self._running, layer=index)

    def _patch_sublayers(self) -> None:
        """Put on the patches that passes with a skip set need."""
        family, read = self.family, dict(self.family.shares).values()
        for index, layer in enumerate(self.layers):
            for name, returns in zip((family.attention, *family.mlp), family.returns[index], strict=True):
                if name == family.attention:
                    part = "read" if index in read else "attention"
                else:
                    part = "before" if name in family.inner else "mlp"
                settings = {"part": part, "layer": index, "returns": returns, "summed": family.summed}
                patches.cover(getattr(layer, name), patches.SkippablePatch, self._running, **settings)
        self._running.skippable = True

    def _layer_arguments(self, index: int, at: Pass, phases: Any) -> dict[str, Any]:
        """The arguments of a layer in a pass. phases: its rotary phases."""
        # recurrent layers get valid tokens only
        mask = None if self.family.recurs(index) else at.mask(self.reaches[index], self._form, self._groups[index])
        values = {"attention_mask": mask, "position_ids": at.positions, "position_embeddings": phases}
        arguments = {name: values[name] for name in self.family.pass_arguments}
        if self.family.alibi is not None:
            arguments[self.family.alibi] = self._biases(at)
        return arguments

    def _biases(self, at: Pass) -> Tensor:
        """ALiBi: every head's slope times a key's position, [b * heads, 1, extent] for BLOOM's alibi, [heads, 1, extent] for
        MPT's position_bias."""
        assert self._slopes is not None
        biases = self._slopes[:, None, None] * at.slot_positions()[:, None, None].float()  # [b or 1, heads, 1, extent]
        if self.family.alibi == "position_bias":
            return biases[0].to(self.dtype)
        return biases.expand(at.shape[0], -1, -1, -1).flatten(0, 1).to(self.dtype)

    def _phases(self, source: RotarySource | None, hidden: Tensor, at: Pass) -> Any:
        """cos and sin of the pass's positions, [b, n, rotary_dim] each, or one complex tensor; None without a source."""
        if source is None:
            return None
        table = self._rotary.table(source, at.extent, hidden)
        if at.first_slot is not None and at.tree is None:
            span = slice(at.first_slot, at.first_slot + at.shape[1])
            phases = [part[None, span] for part in table]
        else:
            phases = [part[at.positions] for part in table]
        return tuple(phases) if len(phases) > 1 else phases[0]


@torch.no_grad()
def _rows(weight: Tensor, bias: Tensor | None, selection: slice | Tensor) -> nn.Linear:
    """A linear layer of some outputs of another. weight: [V, d']. bias: [V]. selection: of V."""
    rows = weight[selection]  # [S, d']
    layer = nn.Linear(weight.shape[1], len(rows), bias=bias is not None, dtype=weight.dtype, device="meta")
    layer.weight = nn.Parameter(rows, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias[selection], requires_grad=False)  # [S]
    return layer
