"""Describes a model to llama.cpp: the name of its architecture, its hyper-parameters, its tensors.

Models that llama.cpp computes differently from transformers, or is not known to compute, are refused by name.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from skipstone.models.families import layer_types
from skipstone.utils.extras import installed

NO_ROPE_EVERY = 4  # llama.cpp's SmolLM3 has no rotary phases in every fourth layer, whatever the file says


ARCHITECTURES = ("llama", "qwen2", "qwen3", "smollm3")
"""transformers' model types, which are llama.cpp's names as well."""
INTERLEAVED = ("llama", "smollm3")
"""Architectures that interleave the two halves of a rotated head in the file."""
BIASES = {"qwen2": ("q_proj.bias", "k_proj.bias", "v_proj.bias")}
"""Ends of the names of biases, of those that have any."""


def expect_architecture(config: Any) -> None:
    """ValueError that names the part of a model that llama.cpp does not compute as transformers does."""
    kind = config.model_type
    if kind not in ARCHITECTURES:
        raise ValueError(f"no GGUF files of {kind} models are written here, expected one of {', '.join(ARCHITECTURES)}")
    if reason := _unknown(config, kind):
        raise ValueError(f"this {kind} model has {reason}, which its GGUF file could not say")


def _unknown(config: Any, kind: str) -> str | None:
    """The unsupported part of a config; None if all is supported."""
    rope = config.rope_parameters
    rope_type = rope.get("rope_type", "default")
    if config.hidden_act != "silu":
        return f"the activation {config.hidden_act!r}"
    if set(layer_types(config)) != {"full_attention"}:
        return "layers with a sliding window"
    if rope_type != "default" and (kind, rope_type) != ("llama", "llama3"):
        return f"rotary phases of the type {rope_type!r}"
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        return "heads of which a part is rotated"
    if kind == "qwen2" and head_size(config) * config.num_attention_heads != config.hidden_size:
        return "heads that are not as wide as its states together"
    if kind == "smollm3":
        expected = [int((layer + 1) % NO_ROPE_EVERY != 0) for layer in range(config.num_hidden_layers)]
        if list(config.no_rope_layers) != expected:
            return f"layers without rotary phases other than every {NO_ROPE_EVERY}th"
    return None


def head_size(config: Any) -> int:
    """The size of an attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def write_hyperparameters(writer: Any, config: Any) -> None:
    """Write a config's hyper-parameters with a GGUFWriter."""
    size = head_size(config)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield llama.cpp's name and layout of every weight of a transformers model, in the model's dtype. ValueError for a weight
    that the architecture does not have."""
    gguf, config = installed("gguf", "GGUF files need gguf", "export"), model.config
    kind = config.model_type
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == kind)
    titles = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads_of = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        title = titles.get_name(name, try_suffixes=(".weight", ".bias"))
        if title is None or (name.endswith(".bias") and not name.endswith(BIASES.get(kind, "none"))):
            raise ValueError(f"llama.cpp's {kind} models have no {name}")
        for projection, heads in heads_of.items() if kind in INTERLEAVED else ():
            if projection in name:
                weight = interleaved(weight, heads)
        yield title, weight
    if config.rope_parameters.get("rope_type") == "llama3":
        yield "rope_freqs.weight", rope_factors(config)


def interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a query or key projection for llama.cpp's rotary phases: the halves of a head alternate. weight:
    [heads * h, d]. Returns the same shape."""
    size = weight.shape[0] // heads
    return weight.reshape(heads, 2, size // 2, -1).transpose(1, 2).reshape(weight.shape)


def rope_factors(config: Any) -> Tensor:
    """llama.cpp's divisors of the rotary frequencies, [h / 2] float32: the base's frequencies over the model's."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))  # [h / 2]
    size = head_size(config)
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device="cpu") / size
    return config.rope_parameters["rope_theta"] ** -exponents / scaled.float()
