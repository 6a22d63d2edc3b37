"""A model's size from its config alone: parameters counted on torch's meta device, activation bytes per token by formulas."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from skipstone.models.derivation import find_layers

FLOAT, HALF = 4, 2  # bytes of a number in float32, and in bfloat16
SIDE_NUMBERS = 2  # float32 numbers a token that a layer's two norms keep: 1 / the root of the mean square, each


def _llama(hidden: int, mlp: int, layers: int, heads: int, vocabulary: int, tied: bool) -> LlamaConfig:
    """Llama 3 has 8 heads of keys and values in every size."""
    shape: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers}
    heads_of: dict[str, Any] = {"num_attention_heads": heads, "num_key_value_heads": 8}
    return LlamaConfig(**shape, **heads_of, vocab_size=vocabulary, max_position_embeddings=131072, tie_word_embeddings=tied)


SHAPES: dict[str, LlamaConfig] = {
    "1B": _llama(2048, 8192, 16, 32, 128256, True),
    "8B": _llama(4096, 14336, 32, 32, 128256, False),
    "70B": _llama(8192, 28672, 80, 64, 128256, False),
}
"""Shapes of Llama 3.2 1B, and of Llama 3.1 8B and 70B: the config.json of meta-llama/Llama-3.2-1B, Llama-3.1-8B and -70B.
Table 3 of "The Llama 3 Herd of Models" (arXiv 2407.21783) has the last two."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model. layer: parameters of its largest layer; in_layers: of all layers; rest: of embeddings, final norm and
    LM head, tied ones once. mlp: inner size of a feed-forward block. queries, keys: their sizes over all heads."""

    layers: int
    layer: int
    in_layers: int
    rest: int
    hidden: int
    mlp: int
    heads: int
    queries: int
    keys: int
    vocabulary: int

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.in_layers + self.rest

    def activations(self, half: bool, autocast: bool) -> int:
        """Bytes a token that a layer of Llama's kind keeps for its gradient. half: it computes in bfloat16; autocast: from
        weights in float32, so that the residual stream stays in float32.

        Two norms (input, normalised input, output), attention (queries, keys, values, output, logarithms of the sums), a gated
        feed-forward block (gate, its activation, up, their product). Attention weights are not kept.
        """
        width = HALF if half else FLOAT
        streams = (FLOAT, FLOAT if autocast or not half else HALF, width)
        norms = 2 * sum(streams) * self.hidden + SIDE_NUMBERS * FLOAT
        attention = width * 2 * (self.queries + self.keys) + FLOAT * self.heads
        return norms + attention + width * 4 * self.mlp

    def stream(self, half: bool, autocast: bool) -> int:
        """Bytes a token of a hidden state between layers."""
        return (HALF if half and not autocast else FLOAT) * self.hidden


def shorten_config(config: PreTrainedConfig, layers: int) -> None:
    """Let a config describe a model of the first layers only."""
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = list(config.layer_types)[:layers]


def meta_model(config: PreTrainedConfig, layers: int | None = None) -> Any:
    """A model without weights. layers: only its first ones."""
    if layers is not None:
        config = copy.deepcopy(config)
        shorten_config(config, layers)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def shape_of(model: Any) -> ModelShape:
    """The sizes of a model, which may be on the meta device. ValueError for experts and for configs without the usual sizes."""
    config = model.config.get_text_config(decoder=True)
    if any(getattr(config, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
        raise ValueError(f"the estimate does not cover mixtures of experts, which this {config.model_type} model is")
    try:
        heads, hidden, mlp = config.num_attention_heads, config.hidden_size, config.intermediate_size
        layers = find_layers(model, config)[2]
    except AttributeError as error:
        raise ValueError(f"the estimate does not know the sizes of this {config.model_type} model: {error}") from error
    size = getattr(config, "head_dim", None) or hidden // heads
    each = [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    total = sum(parameter.numel() for parameter in model.parameters())
    keys = size * (getattr(config, "num_key_value_heads", None) or heads)
    sizes = (hidden, mlp, heads, size * heads, keys, config.vocab_size)
    return ModelShape(len(each), max(each), sum(each), total - sum(each), *sizes)
