"""How the layers of the model types that the native engine runs differ from Llama's."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class LayerVariant:
    """How a type's layer differs from Llama's.

    norms: names of the layer's norms, by their places. norm_offset: added to the stored weight of a norm (Gemma stores w - 1).
    query_norm: None, "head" (per head) or "whole" (over all heads of a token). fused: q, k, v are one matrix, and so are gate
    and up. activation: name of the MLP's activation module. scales_embeddings: embeddings are multiplied by the root of the
    hidden size.
    """

    norms: Mapping[str, str] = field(
        default_factory=lambda: {"before_attention": "input_layernorm", "before_mlp": "post_attention_layernorm"}
    )
    norm_offset: float = 0.0
    query_norm: str | None = None
    fused: bool = False
    activation: str = "act_fn"
    scales_embeddings: bool = False


_LLAMA = LayerVariant()
_AFTER = {"after_attention": "post_attention_layernorm", "after_mlp": "post_feedforward_layernorm"}
_FOUR_NORMS = _AFTER | {"before_attention": "input_layernorm", "before_mlp": "pre_feedforward_layernorm"}
LAYER_VARIANTS: dict[str, LayerVariant] = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "smollm3", "granite"), _LLAMA),
    "qwen3": LayerVariant(query_norm="head"),
    "olmo2": LayerVariant(_AFTER, query_norm="whole"),
    "phi3": LayerVariant(fused=True, activation="activation_fn"),
    "gemma": LayerVariant(norm_offset=1.0, scales_embeddings=True),
    "gemma2": LayerVariant(_FOUR_NORMS, norm_offset=1.0, scales_embeddings=True),
    "gemma3_text": LayerVariant(_FOUR_NORMS, norm_offset=1.0, query_norm="head", scales_embeddings=True),
}
"""By transformers' model type."""
ACTIVATIONS = {"silu": 0, "swish": 0, "gelu_pytorch_tanh": 1, "gelu_new": 1}
"""Names of activations in a config, and their numbers in the C ABI."""
