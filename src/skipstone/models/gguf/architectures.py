"""Translates llama.cpp's architectures for transformers: the values of config.json, and the names of the tensors.

Defaults are llama.cpp's (src/llama-model.cpp and src/models/). Phi-3 and Mistral have windows, as in the originals; llama.cpp
ignores them.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from skipstone.models.gguf.reader import GgufFile
from skipstone.models.mapped_config import FULL, SLIDING, UnmappableError

MODEL_TYPES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "smollm3", "granite", "olmo2", "phi3", "gemma", "gemma2")},
    "gemma3": "gemma3_text",
}
"""transformers' model types by llama.cpp's architectures. Mistral's files say llama."""
INTERLEAVED = ("llama", "smollm3", "granite")
"""Files of these architectures alternate the rows of the two halves of a rotated head."""
FACTORS = {
    **dict.fromkeys(("llama", "granite"), ("rope_freqs.weight", "rope_freqs.weight")),
    "phi3": ("rope_factors_short.weight", "rope_factors_long.weight"),
}
"""Tensors that divide the rotary frequencies of short and of long texts, by the architectures that may have them."""
WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6}
"""If a file does not say which layers attend to the whole text, every second or sixth layer does."""
WIDE_DEPTHS = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the 27B models. They scale scores by the hidden size over the heads, the others by the head's size."""
_SIZES = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
}
_TOKENS = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
_GRANITE = {
    "logits_scaling": "logit_scale",
    "residual_multiplier": "residual_scale",
    "embedding_multiplier": "embedding_scale",
    "attention_multiplier": "attention.scale",
}
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OTHER_PARTS = {
    "phi3": {"ffn_up": "mlp.gate_up_proj"},
    "gemma2": {"ffn_norm": "pre_feedforward_layernorm"},
    "gemma3": {"ffn_norm": "pre_feedforward_layernorm"},
}
_TITLE = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")


class TensorSource(NamedTuple):
    """Where a weight comes from. name: in the file. heads: as in `StoredBlocks`."""

    name: str
    heads: int


def config_values(file: GgufFile) -> dict[str, Any]:
    """The values of config.json, for `MappedConfig`. UnmappableError for what the native engine does not run."""
    fields = _Fields(file)
    kind = file.architecture
    values: dict[str, Any] = {"model_type": MODEL_TYPES[kind], "tie_word_embeddings": "output.weight" not in file.tensors}
    if kind == "llama" and fields.integer("attention.sliding_window", 0):
        values["model_type"] = "mistral"
    values |= {name: fields.integer(key) for name, key in _SIZES.items()}
    for name, key in _TOKENS.items():
        token = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        values[name] = token if type(token) is int else None
    heads, layers = values["num_attention_heads"], values["num_hidden_layers"]
    if not 0 < layers <= len(file.tensors) or heads < 1 or "token_embd.weight" not in file.tensors:
        raise UnmappableError("has no layers, heads or embeddings, or fewer than it says")
    size = fields.integer("attention.key_length", values["hidden_size"] // heads)
    if size % 2 or fields.integer("attention.value_length", size) != size:
        raise UnmappableError("has heads of an odd size, or values of another size than keys")
    values |= {
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "num_key_value_heads": fields.integer("attention.head_count_kv", heads),
        "head_dim": size,
        "rms_norm_eps": fields.number("attention.layer_norm_rms_epsilon"),
        "attention_bias": kind != "qwen2" and "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
    }
    if kind == "granite":
        values |= {name: fields.number(key, 0.0) or 1.0 for name, key in _GRANITE.items()}
        values["attention_multiplier"] = fields.number("attention.scale", 0.0) or size**-0.5
    return values | _windows(fields, layers) | _gemma(fields, values) | _rotary_phases(fields, values)


def tensor_sources(file: GgufFile, config: Any) -> dict[str, TensorSource]:
    """Where each weight comes from, by transformers' name. Tensors of unknown names are left out. config: a `MappedConfig`."""
    kind = file.architecture
    parts = _PARTS | _OTHER_PARTS.get(kind, {})
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads} if kind in INTERLEAVED else {}
    found = {}
    for name in file.tensors:
        layer, title, role = match.groups() if (match := _TITLE.fullmatch(name)) else (None, "", "")
        known = parts.get(title) if layer else _NAMES.get(title)
        if known:
            place = f"model.layers.{layer}." if layer else ""
            found[f"{place}{known}.{role}"] = TensorSource(name, heads.get(title, 0))
    return found


class _Fields:
    """The hyper-parameters of a file's architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.kind = file, file.architecture
        has_no_phases = self.kind == "granite" and self.get("rope.scaling.finetuned", True) is False
        if self.get("attention.causal", True) is not True or has_no_phases:
            raise UnmappableError("has attention to later tokens, or no rotary phases")

    def get(self, key: str, default: Any = None) -> Any:
        """A hyper-parameter of any type."""
        return self.file.metadata.get(f"{self.kind}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        """UnmappableError for another type, and without a value."""
        value = self.get(key, default)
        if type(value) is not int or value < 0:
            raise UnmappableError(f"has no single number {key}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """UnmappableError for another type, and without a value."""
        value = self.get(key, default)
        if type(value) is not float or not np.isfinite(value):
            raise UnmappableError(f"has no single number {key}")
        return value


def _windows(fields: _Fields, layers: int) -> dict[str, Any]:
    """The size of the attention's windows, and the layers that have them."""
    window = fields.integer("attention.sliding_window", 4096 if fields.kind == "gemma2" else 0) or None
    if fields.kind not in WINDOW_PERIODS:
        return {} if window is None else {"sliding_window": window}
    if window is None:
        return {"layer_types": [FULL] * layers}
    pattern = fields.get("attention.sliding_window_pattern", WINDOW_PERIODS[fields.kind])
    if type(pattern) is int and pattern > 0:
        slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    elif isinstance(pattern, np.ndarray) and len(pattern) == layers:
        slides = pattern.tolist()
    else:
        raise UnmappableError("has a pattern of windows that does not fit its layers")
    return {"sliding_window": window, "layer_types": [SLIDING if one else FULL for one in slides]}


def _gemma(fields: _Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma's own values. Its files keep norms with their offset added."""
    if not fields.kind.startswith("gemma"):
        return {}
    if fields.kind == "gemma":
        return {"norm_offset": 0.0}
    is_wide = values["num_hidden_layers"] == WIDE_DEPTHS[fields.kind]
    scalar = values["hidden_size"] // values["num_attention_heads"] if is_wide else values["head_dim"]
    attention, final = (50.0, 30.0) if fields.kind == "gemma2" else (0.0, 0.0)
    return {
        "norm_offset": 0.0,
        "query_pre_attn_scalar": scalar,
        "attn_logit_softcapping": fields.number("attn_logit_softcapping", attention) or None,
        "final_logit_softcapping": fields.number("final_logit_softcapping", final) or None,
    }


def _rotary_phases(fields: _Fields, values: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary phases. values: of the config, with the sizes."""
    size, length = values["head_dim"], values["max_position_embeddings"]
    scaling, amplification = fields.get("rope.scaling.type", "linear"), fields.number("rope.scaling.attn_factor", 1.0)
    factor = fields.number("rope.scaling.factor", fields.number("rope.scale_linear", 0.0)) or 1.0
    rotated = fields.integer("rope.dimension_count", size)
    if rotated % 2 or not 0 < rotated <= size:
        raise UnmappableError(f"rotates {rotated} numbers of a head of {size}")
    phases: dict[str, Any] = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base", 10000.0)}
    names = FACTORS.get(fields.kind, ())
    if (stored := {name for name in fields.file.tensors if name.startswith("rope_")}) not in (set(), {*names}):
        raise UnmappableError(f"has {', '.join(stored)}, which do not fit its architecture")
    if stored:
        divisors = [_divisors(fields.file, name, rotated) for name in names]
        if scaling == "linear":
            divisors = [one * factor for one in divisors]
        phases |= {"rope_type": "longrope", "short_factor": divisors[0].tolist(), "long_factor": divisors[1].tolist()}
        phases["original_max_position_embeddings"] = fields.integer("rope.scaling.original_context_length", length) or length
        phases["attention_factor"] = amplification
    elif not isinstance(scaling, str) or scaling not in ("linear", "none") or amplification != 1.0:
        raise UnmappableError(f"has rotary phases that are scaled by {scaling!r}, or amplified")
    elif scaling == "linear" and factor != 1.0:
        phases |= {"rope_type": "linear", "factor": factor}
    if rotated != size:
        phases["partial_rotary_factor"] = rotated / size
    if fields.kind != "gemma3":
        return {"rope_parameters": phases}
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", 10000.0)}
    return {"rope_parameters": {FULL: phases, SLIDING: local}}


def _divisors(file: GgufFile, name: str, rotated: int) -> np.ndarray:
    """[rotated / 2] float32 divisors of the rotary frequencies."""
    stored = file.tensors[name]
    if stored.kind != "F32" or stored.shape != (rotated // 2,):
        raise UnmappableError(f"has {name} in {stored.kind} of shape {list(stored.shape)}, expected F32 and [{rotated // 2}]")
    divisors = stored.data.view("<f4")
    if not (np.isfinite(divisors) & (divisors > 0)).all():
        raise UnmappableError(f"has {name} that are not positive")
    return divisors
