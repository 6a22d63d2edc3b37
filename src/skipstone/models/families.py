"""The description of a decoder's structure: where its parts are, and what surrounds its layers.

transformers owns the modelling code. A `Family` is derived from one traced forward of a model (derivation.py). EXCEPTIONS has
the facts that a trace does not show.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from skipstone.models import altup
from skipstone.models.mapped_config import MappedConfig
from skipstone.models.passes import AttentionReach

ReachKind = Literal["full", "sliding", "chunked"]
RECURRENT = ("linear_attention", "conv")
"""Layer types of transformers with states without positions."""
PER_LAYER = "per_layer_input"  # argument of a layer for inputs of its own for every token
SHARED = "shared_kv_states"  # argument of a layer for keys and values that layers share


class InputStep(NamedTuple):
    """One module between ids and layer 0.

    path: under the decoder. how: "tokens" is called with the ids, "apply" with the result so far. "positions" is called with
    the positions and added; so is "named positions", OPT's module, which takes a mask first.
    """

    path: str
    how: str


class RotarySource(NamedTuple):
    """The source of a layer's rotary phases.

    path: of a module under the decoder. kind: layer type that the module takes, or "". axes: number of copies of the positions
    that it takes, one per axis of a picture (Qwen-VL), 0 for plain positions.
    """

    path: str
    kind: str = ""
    axes: int = 0


@dataclass(frozen=True)
class Family:
    """The structure of one model, as plain values. Paths are under `decoder`, names of sublayers under a layer.

    decoder: path from `model.get_decoder()` to the module that owns the layers.
    layers: name of its list of layers.
    entering: modules from ids to layer 0.
    input_scale: field of the config that scales the embeddings; "sqrt" for the root of the hidden size.
    leaving: modules from the last layer to the LM head, the final norm first.
    logits: operation on the LM head's output, and the field of the config with its operand.
    rotary: source of every layer's phases.
    attention: name of a layer's attention.
    mlp: modules of its MLP sublayer in order.
    inner: modules of `mlp` that only feed the next one; the outputs of the others are added to the residual stream.
    returns: for every layer, the number of values that its attention and each module of its MLP return, 0 for a tensor outside
    of a tuple; empty for layers without an attention.
    summed: name of a sublayer's argument for the residual stream, if it returns the sum itself.
    unskippable: why sublayers cannot be skipped, as the end of a sentence about the model; "" if they can.
    cache_argument: name of a layer's argument for the KV cache.
    arguments: names and values of a layer's constant arguments.
    pass_arguments: names of a layer's arguments that depend on the pass.
    reaches: how far back every layer attends.
    attention_interface: the attention uses transformers' AttentionInterface.
    float_masks: masks are added, also with sdpa.
    hiding_masks: True in a boolean mask hides.
    post_norm: a norm follows the residual sum, or the residual stream itself is normed or scaled. Then even an empty layer
    changes its input.
    alibi: name of a layer's argument for linear position biases (ALiBi).
    reads_cache_length: layers read the cache's length, which has no effect within the model's positions here.
    max_positions_field: field of the config that limits these positions further.
    window: field of the config with the sliding window.
    mask_buffer_path: path of a module under the attention that masks by its buffer `bias`, which takes slots for positions.
    per_layer_inputs: size of each layer's input of its own for every token (Gemma 4's per-layer embeddings), 0 for none;
    appended to the hidden states.
    streams: number of streams of states (Gemma 3n's AltUp); concatenated in the hidden states.
    shares: layer types that read keys and values of another layer, and the index of that layer.
    recurrent: for every layer, the sublayer that keeps a state without positions in place of an attention, "" for an attention;
    empty if all layers have attentions.
    """

    decoder: str = ""
    layers: str = "layers"
    entering: tuple[InputStep, ...] = (InputStep("embed_tokens", "tokens"),)
    input_scale: str | None = None
    leaving: tuple[str, ...] = ("norm",)
    logits: tuple[Literal["", "divide", "multiply", "softcap"], str] = ("", "")
    rotary: tuple[RotarySource | None, ...] = ()
    attention: str = "self_attn"
    mlp: tuple[str, ...] = ("mlp",)
    inner: tuple[str, ...] = ()
    returns: tuple[tuple[int, ...], ...] = ()
    summed: str | None = None
    unskippable: str = ""
    cache_argument: str = "past_key_values"
    arguments: tuple[tuple[str, Any], ...] = ()
    pass_arguments: tuple[str, ...] = ("attention_mask", "position_ids", "position_embeddings")
    reaches: tuple[ReachKind, ...] = ()
    attention_interface: bool = True
    float_masks: bool = False
    hiding_masks: bool = False
    post_norm: bool = False
    alibi: str | None = None
    reads_cache_length: bool = False
    max_positions_field: str | None = None
    window: str = "sliding_window"
    mask_buffer_path: str | None = None
    per_layer_inputs: int = 0
    streams: int = 1
    shares: tuple[tuple[str, int], ...] = ()
    recurrent: tuple[str, ...] = ()

    def owner(self, model: Any) -> Any:
        """The module of a model that owns its layers."""
        return submodule(model.get_decoder(), self.decoder)

    def recurs(self, layer: int) -> bool:
        """Whether a layer has a state without positions."""
        return bool(self.recurrent and self.recurrent[layer])

    def mixer(self, layer: int) -> str:
        """The name of a layer's sublayer that mixes tokens: its attention or recurrent sublayer."""
        return self.recurrent[layer] if self.recurs(layer) else self.attention

    def embed(self, decoder: Any, config: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states that enter layer 0, [B, n, d], including all streams and per-layer inputs. tokens, positions: [B, n]
        int64."""
        hidden = tokens
        for step in self.entering:
            module = submodule(decoder, step.path)
            if step.how == "positions":
                hidden = hidden + module(positions).to(hidden.device)
            elif step.how == "named positions":
                hidden = hidden + module(None, position_ids=positions).to(hidden.device)
            else:
                hidden = module(hidden)
        if self.input_scale is not None:
            own = getattr(decoder, self.input_scale, None)  # transformers copies the number from the config
            scale = own if own is not None else getattr(config, self.input_scale, None)
            hidden = hidden * (config.hidden_size**0.5 if scale is None else scale)
        states = self.folded(altup.made(decoder, hidden)) if self.streams > 1 else hidden
        if not self.per_layer_inputs:
            return states
        inputs = decoder.project_per_layer_inputs(hidden, decoder.get_per_layer_inputs(tokens))  # [B, n, L, p]
        return torch.cat([states, inputs.flatten(2)], -1)

    def parts(self, hidden: Tensor, config: Any) -> tuple[Tensor, list[Tensor]]:
        """Split hidden states into (the states for layers, the per-layer inputs of every layer [..., p])."""
        if self.streams == 1 and not self.per_layer_inputs:
            return hidden, []
        size = self.streams * config.hidden_size
        states, inputs = hidden[..., :size], hidden[..., size:]
        per_layer = list(inputs.split(self.per_layer_inputs, -1)) if self.per_layer_inputs else []
        return (altup.unfolded(states, self.streams) if self.streams > 1 else states), per_layer

    def folded(self, states: Tensor) -> Tensor:
        """Concatenate a layer's streams to one vector per token: [k, B, n, d] -> [B, n, k * d]; [B, n, d] stays."""
        return altup.folded(states) if self.streams > 1 else states

    def finish(self, decoder: Any, hidden: Tensor) -> Tensor:
        """Final norm (and OPT's projection) before the LM head. hidden: [..., d], with or without per-layer inputs."""
        if self.per_layer_inputs or self.streams > 1:
            hidden = hidden[..., : self.streams * submodule(decoder, self.leaving[0]).weight.shape[0]]
        if self.streams > 1:
            hidden = altup.merged(decoder, altup.unfolded(hidden, self.streams))
        for path in self.leaving:
            hidden = submodule(decoder, path)(hidden)
        return hidden

    def scored(self, scores: Tensor, config: Any) -> Tensor:
        """Logits from the outputs of the LM head, [..., V]."""
        how, name = self.logits
        value = getattr(config, name) if name else None
        if value is None:
            return scores
        if how == "softcap":  # cap * tanh(logits / cap) (Gemma 2, arXiv 2408.00118, section 2)
            return (scores / value).tanh() * value
        return scores / value if how == "divide" else scores * value


def submodule(module: Any, path: str) -> Any:
    """The submodule at a dotted path; the module itself for an empty path."""
    return module.get_submodule(path) if path else module


def text_config(model: Any) -> Any:
    """The config of the text model, also inside a multimodal wrapper."""
    return model.config.get_text_config(decoder=True)


def text_ids(model: Any) -> int:
    """Number of text ids from 0 on: the rows of the input embedding, up to the ids that a multimodal model embeds by other
    modules (Gemma 3n's `vocab_offset`)."""
    parts = [getattr(model.config, name, None) for name in model.config.sub_configs]
    offsets = [offset for part in parts if isinstance(offset := getattr(part, "vocab_offset", None), int)]
    return min([model.get_input_embeddings().weight.shape[0], *offsets])


def attention_reaches(config: Any, family: Family) -> list[AttentionReach]:
    """How far back every layer of a model attends."""
    sizes = {
        "full": AttentionReach(),
        "sliding": AttentionReach(window=getattr(config, family.window, None)),
        "chunked": AttentionReach(chunk=getattr(config, "attention_chunk_size", None)),
    }
    return [sizes[kind] for kind in family.reaches]


def layer_types(config: Any) -> list[str]:
    """transformers' type of every layer."""
    if isinstance(config, MappedConfig):
        return config.kinds_of_layers
    from transformers.cache_utils import get_layer_types_and_kwargs

    types = get_layer_types_and_kwargs(config)[0][: config.num_hidden_layers]
    if any(getattr(config, "kv_sharing_modes", None) or ()):  # layers that read another layer's keys have the type "dummy"
        return [own if kind == "dummy" else kind for kind, own in zip(types, config.layer_types, strict=True)]
    return types


def stateful_kinds(config: Any) -> list[str]:
    """transformers' type of every layer with a state without positions, "" for other layers."""
    return [kind if kind in RECURRENT else "" for kind in layer_types(config)]


def alibi_slopes(heads: int, device: torch.device) -> Tensor:
    """The slope of every head, [heads] float32 (Press et al., arXiv 2108.12409, section 3; heads beyond a power of two take
    every second slope of the next one)."""
    power = 1 << (heads.bit_length() - 1)
    exponents = [-8 * (i + 1) / power for i in range(power)] + [-4 * (2 * i + 1) / power for i in range(heads - power)]
    return torch.tensor([2.0**exponent for exponent in exponents], dtype=torch.float32, device=device)


def max_positions(config: Any, family: Family | None = None) -> tuple[int, str]:
    """(maximum number of positions of a sequence, the source of that number).

    Some rotary variants change the phases of earlier tokens when a sequence grows (longrope, dynamic NTK), which would
    invalidate stored keys. They are limited to the length at which nothing changes: longrope's original length, and
    `max_position_embeddings` for dynamic NTK.
    """
    limit, source = getattr(config, "max_position_embeddings", None) or 1 << 20, "max_position_embeddings"
    rotary = getattr(config, "rope_parameters", None) or {}
    for settings in [value for value in rotary.values() if isinstance(value, dict)] or [rotary]:  # one per layer type, or one
        kind, original = settings.get("rope_type", "default"), settings.get("original_max_position_embeddings")
        if kind == "longrope" and original and original < limit:
            limit, source = original, "original_max_position_embeddings: beyond it longrope would switch inside the request"
        elif kind == "dynamic":
            source = "max_position_embeddings: beyond it dynamic RoPE would switch inside the request"
    own = getattr(config, family.max_positions_field) if family is not None and family.max_positions_field else limit
    return (
        (own, f"{family.max_positions_field}: beyond it its attention changes") if family and own < limit else (limit, source)
    )


def _gpt_neo(config: Any) -> Mapping[str, Any]:
    """GPT-Neo's attentions mask by windows in buffers of their own; the masks of its layers are only causal."""
    reach = {"global": "full", "local": "sliding"}
    kinds_of_layers = tuple(reach[kind] for kind in config.attention_layers)
    return {"reaches": kinds_of_layers, "window": "window_size", "mask_buffer_path": "attention"}


EXCEPTIONS: dict[str, Callable[[Any], Mapping[str, Any]]] = {
    "gpt_neo": _gpt_neo,
    "doge": lambda _: {"attention_interface": False},  # adds its own mask to that of the pass
    # from floor_scale on, layers without rotary phases scale queries by the position after the cached tokens
    "llama4_text": lambda _: {"reads_cache_length": True, "max_positions_field": "floor_scale"},
    "mpt": lambda _: {"reads_cache_length": True},  # cuts biases from a square; skipstone passes one row of it
}
"""Fields of `Family` that a trace does not show, by model type: functions of the config."""


def exceptions_of(config: Any) -> Mapping[str, Any]:
    """The entry of EXCEPTIONS for a model."""
    known = EXCEPTIONS.get(config.model_type)
    return {} if known is None else known(config)
