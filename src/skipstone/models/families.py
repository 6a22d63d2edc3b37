"""One table of facts per model family: where a decoder keeps its parts and which scalars surround its layers.

transformers owns the modelling code; this file only names its modules. To add a family see docs/add-a-family.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from transformers.cache_utils import get_layer_types_and_kwargs


def _same(logits: Tensor, _: Any) -> Tensor:
    return logits


def _softcap(logits: Tensor, config: Any) -> Tensor:
    """cap * tanh(logits / cap) where the config sets a cap (Gemma 2, arXiv 2408.00118, section 2)."""
    cap = getattr(config, "final_logit_softcapping", None)
    return logits if cap is None else (logits / cap).tanh() * cap


@dataclass(frozen=True)
class Family:
    """Facts about one family: names of attributes of `model.get_decoder()`, and where said of one decoder layer."""

    layers: str = "layers"
    embedding: str = "embed_tokens"
    positions: str | None = None  # the learned position embedding, None for rotary ones
    project_in: str | None = None  # from the embedding's size to the layers'
    project_out: str | None = None  # and back, in front of the LM head
    input_scale: str | None = None  # field of the config that multiplies the embeddings
    norm: str = "norm"  # the final one
    rotary: str | None = "rotary_emb"
    rotary_by_kind: bool = False  # the rotary module wants to know the layer type
    attention: str = "self_attn"  # of a layer: its attention sublayer
    mlp: tuple[str, ...] = ("mlp",)  # of a layer: the modules of its MLP sublayer in order, whose output is that of the last
    cache_argument: str = "past_key_values"  # of a layer's forward: the KV cache
    arguments: tuple[tuple[str, Any], ...] = ()  # of a layer's forward: what else it must be given
    window: Literal["none", "every", "by_layer"] = "none"
    """Layers that the model's own forward gives a sliding-window mask where `config.sliding_window` is set: none, every one, or
    those that `config.layer_types` names."""
    attention_interface: bool = True  # the attention looks its function up in transformers' AttentionInterface
    logits: Callable[[Tensor, Any], Tensor] = _same  # (output of the LM head, config) -> logits
    refuse: Callable[[Any], str | None] = lambda _: None  # what a config uses that cannot be decoded, None where all can
    post_norm: Callable[[Any], bool] = lambda _: False  # norms follow the residual sum: even an empty layer changes its input

    def embed(self, decoder: Any, config: Any, tokens: Tensor, positions: Tensor) -> Tensor:
        """Hidden states that enter layer 0. tokens, positions: [B, n] int64. Returns [B, n, d]."""
        hidden = getattr(decoder, self.embedding)(tokens)
        if self.project_in is not None and (projection := getattr(decoder, self.project_in)) is not None:
            hidden = projection(hidden)
        if self.input_scale is not None:
            hidden = hidden * getattr(config, self.input_scale)
        if self.positions == "embed_positions":  # OPT's module takes a mask first and adds its own offset
            return hidden + decoder.embed_positions(None, position_ids=positions).to(hidden.device)
        return hidden if self.positions is None else hidden + getattr(decoder, self.positions)(positions).to(hidden.device)

    def finish(self, decoder: Any, hidden: Tensor) -> Tensor:
        """Final norm (and OPT's projection) before the LM head. hidden: [..., d]."""
        norm = getattr(decoder, self.norm)
        hidden = hidden if norm is None else norm(hidden)
        if self.project_out is not None and (projection := getattr(decoder, self.project_out)) is not None:
            hidden = projection(hidden)
        return hidden


def _unless(field: str, what: str) -> Callable[[Any], str | None]:
    """Refuses configs that set a field, which stands for what cannot be decoded."""
    return lambda config: what if getattr(config, field) else None


_one_way = _unless("use_bidirectional_attention", "bidirectional attention")
_LLAMA = Family()
_SLIDING = Family(window="every")
_MIXED = Family(window="by_layer")
FAMILIES: dict[str, Family] = {
    "llama": _LLAMA,
    "mistral": _SLIDING,
    "qwen2": _MIXED,
    "qwen3": _MIXED,
    "gemma": Family(refuse=_one_way),
    "gemma2": Family(window="by_layer", logits=_softcap, refuse=_one_way),
    "gemma3_text": Family(window="by_layer", logits=_softcap, rotary_by_kind=True, refuse=_one_way),
    "phi3": _SLIDING,
    "olmo2": _LLAMA,
    "granite": Family(input_scale="embedding_multiplier", logits=lambda logits, config: logits / config.logits_scaling),
    "cohere": Family(logits=lambda logits, config: logits * config.logit_scale),
    "smollm3": _MIXED,
    "starcoder2": _SLIDING,
    "mixtral": _SLIDING,
    "qwen3_moe": _SLIDING,
    "gpt2": Family(
        layers="h",
        embedding="wte",
        positions="wpe",
        norm="ln_f",
        rotary=None,
        attention="attn",
        refuse=_unless("add_cross_attention", "cross-attention"),
    ),
    "opt": Family(
        positions="embed_positions",
        project_in="project_in",
        project_out="project_out",
        norm="final_layer_norm",
        rotary=None,
        mlp=("fc1", "fc2"),
        post_norm=lambda config: not config.do_layer_norm_before,
    ),
    "gpt_neox": Family(embedding="embed_in", norm="final_layer_norm", attention="attention", cache_argument="layer_past"),
    "falcon": Family(
        layers="h",
        embedding="word_embeddings",
        norm="ln_f",
        attention="self_attention",
        cache_argument="layer_past",
        arguments=(("alibi", None),),
        attention_interface=False,
        refuse=_unless("alibi", "alibi position biases"),
    ),
}

TYPES = {"full_attention", "sliding_attention"}  # of layers


def windows(config: Any) -> list[int | None]:
    """The sliding window of every layer in tokens, a token itself included; None for full attention."""
    rule, window = FAMILIES[config.model_type].window, getattr(config, "sliding_window", None)
    slides = {"none": (), "every": tuple(TYPES), "by_layer": ("sliding_attention",)}[rule]
    return [window if kind in slides else None for kind in kinds(config)]


def kinds(config: Any) -> list[str]:
    """The layer type of every layer, "full_attention" or "sliding_attention" in families that are known."""
    return get_layer_types_and_kwargs(config)[0][: config.num_hidden_layers]


def max_positions(config: Any) -> tuple[int, str]:
    """(most positions a sequence may have, where that number comes from).

    Rotary variants that change the phases of *earlier* tokens once a sequence grows (longrope, dynamic NTK) would invalidate
    stored keys inside a request; they are limited to the length below which nothing switches: longrope's original length,
    and `max_position_embeddings` for dynamic NTK.
    """
    limit, source = getattr(config, "max_position_embeddings", None) or 1 << 20, "max_position_embeddings"
    rotary = getattr(config, "rope_parameters", None) or {}
    for settings in [value for value in rotary.values() if isinstance(value, dict)] or [rotary]:  # one per layer type, or one
        kind, original = settings.get("rope_type", "default"), settings.get("original_max_position_embeddings")
        if kind == "longrope" and original and original < limit:
            limit, source = original, "original_max_position_embeddings: beyond it longrope would switch inside the request"
        elif kind == "dynamic":
            source = "max_position_embeddings: beyond it dynamic RoPE would switch inside the request"
    return limit, source
