"""Tiny random models of every supported family, with the facts that make a family special switched on.

Later layers count for less and the head is sharp, so that drafts by the first half of the layers are really both accepted and
rejected. Sliding windows are 8 tokens; layer kinds are mixed wherever the family can mix them.
"""

import functools
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skipstone.engines.model_runner import ModelRunner
from skipstone.models.derivation import find_layers
from skipstone.models.families import text_config
from skipstone.models.generation_config import GenerationFields
from skipstone.models.mapped_config import MappedConfig
from skipstone.models.mapped_model import MappedModel
from skipstone.models.weight_files import weight_files

WINDOW = 8
POSITIONS = 2048
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": POSITIONS,
}
_MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4}
_FALCON = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 4, "max_position_embeddings": POSITIONS}
_OPT = {**_FALCON, "ffn_dim": 64, "word_embed_proj_dim": 32}
_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
_FACTORS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.7, "attention_multiplier": 0.4}
_PHI: dict[str, Any] = {
    "sliding_window": WINDOW,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    "original_max_position_embeddings": POSITIONS,
}


def _alternating(layers: int, kind: str = "sliding_attention") -> list[str]:
    return [kind if layer % 2 == 0 else "full_attention" for layer in range(layers)]


def _qwen(layers: int) -> dict[str, Any]:
    return {**_SLIDING, "max_window_layers": 1}


def _gemma(layers: int) -> dict[str, Any]:
    return {"sliding_window": WINDOW, "layer_types": _alternating(layers), "head_dim": 12, "query_pre_attn_scalar": 10}


# name: (model_type, config fields, further ones that depend on the number of layers)
_TABLE: dict[str, tuple[str, dict[str, Any], Any]] = {
    "llama": ("llama", SHAPE, None),
    "mistral": ("mistral", {**SHAPE, "sliding_window": WINDOW}, None),
    "qwen2": ("qwen2", SHAPE, _qwen),
    "qwen3": ("qwen3", {**SHAPE, "head_dim": 12}, _qwen),
    "gemma": ("gemma", {**SHAPE, "head_dim": 12}, None),
    "gemma2": ("gemma2", {**SHAPE, "final_logit_softcapping": 20.0, "attn_logit_softcapping": 3.0}, _gemma),
    "gemma3_text": ("gemma3_text", {**SHAPE, "final_logit_softcapping": 20.0}, _gemma),
    "phi3": ("phi3", {**SHAPE, **_PHI}, None),
    "olmo2": ("olmo2", SHAPE, None),
    "granite": ("granite", {**SHAPE, **_FACTORS}, None),
    "cohere": ("cohere", {**SHAPE, "logit_scale": 0.6, "use_qk_norm": True}, None),
    "smollm3": ("smollm3", {**SHAPE, "no_rope_layer_interval": 2, **_SLIDING}, None),
    "starcoder2": ("starcoder2", {**SHAPE, "sliding_window": WINDOW}, None),
    "gpt2": ("gpt2", {"n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": POSITIONS}, None),
    "opt": ("opt", _OPT, None),
    "opt_projected": ("opt", {**_OPT, "word_embed_proj_dim": 24}, None),
    "opt_post_norm": ("opt", {**_OPT, "word_embed_proj_dim": 24, "do_layer_norm_before": False}, None),
    "gpt_neox": ("gpt_neox", {**_FALCON, "intermediate_size": 64}, None),
    "gpt_neox_sequential": ("gpt_neox", {**_FALCON, "intermediate_size": 64, "use_parallel_residual": False}, None),
    "falcon": ("falcon", {**_FALCON, "multi_query": True}, None),
    "falcon_new": ("falcon", {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}, None),
    "falcon_sequential": ("falcon", {**_FALCON, "multi_query": False, "parallel_attn": False, "bias": True}, None),
    "mixtral": ("mixtral", {**SHAPE, **_MOE, "num_local_experts": 4, "sliding_window": WINDOW}, None),
    "qwen3_moe": (
        "qwen3_moe",
        {**SHAPE, **_MOE, **_SLIDING, "head_dim": 12, "mlp_only_layers": [1], "norm_topk_prob": True},
        None,
    ),
}
# what further types are built of: fields of tiny models by the names that configs have for them
_TINY: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 32),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), POSITIONS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
    "num_key_value_heads": 2,
}
_LATENT = {"num_key_value_heads": 4}  # multi-head latent attention has keys and values for every head
_SHARING = {  # the last two layers read the keys and values of the two before
    "mixed": "sliding_attention",
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": 97,
    "hidden_size_per_layer_input": 8,
}
_STREAMS = {"laurel_rank": 4, "activation_sparsity_pattern": [0.6, 0.0], "final_logit_softcapping": 20.0}
_EACH_LAYER = ("layer_types", "no_rope_layers", "activation_sparsity_pattern")
"""Fields with a value for every layer; those of the first layers are said again where there are more."""
_OWN_IDS = {"bos_token_id": 1, "eos_token_id": 2}  # configs that insist on some
# model type: fields that its tiny config needs beside those
_PLAIN = """
afmoe apertus arcee aria_text biogpt bitnet bloom codegen diffllama doge ernie4_5 ernie4_5_moe exaone4
exaone_moe flex_olmo fuyu glm glm4 glm4_moe gpt_bigcode gpt_neox_japanese gptj granite_swa granitemoe granitemoe_swa
granitemoeshared helium hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 minimax_m2 minimax_m3_vl_text
ministral3 mpt nanochat olmo olmoe persimmon phi phimoe seed_oss solar_open stablelm vaultgemma xglm
"""
_LINEAR: dict[str, Any] = {
    **{"mixed": "linear_attention", "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
# model type: the same of those that mix attention with layers whose states have no positions
_HYBRID: dict[str, dict[str, Any]] = {
    **{kind: {"mixed": "conv"} for kind in ("lfm2", "lfm2_moe", "lfm3")},
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"), _LINEAR),
    "granitemoehybrid": {
        **{**_MAMBA, **_FACTORS, "mixed": "linear_attention"},
        **{"shared_intermediate_size": 32, "position_embedding_type": "nope"},
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
}
_FURTHER: dict[str, dict[str, Any]] = {
    **_HYBRID,
    **{kind: {} for kind in _PLAIN.split()},
    **dict.fromkeys(("axk1", "deepseek_v3", "glm4_moe_lite", "youtu"), _LATENT),
    **dict.fromkeys(("cwm", "emu3"), _OWN_IDS),
    **{kind: {"head_dim": 8} for kind in ("hunyuan_v1_dense", "hunyuan_v1_moe", "ministral")},
    **{kind: {"mixed": "sliding_attention"} for kind in ("flint", "gpt_oss", "laguna", "mellum", "olmo3", "mimo_v2_flash")},
    "cohere2": {"mixed": "sliding_attention", "logit_scale": 0.6},
    "cohere2_moe": {"logit_scale": 0.6},
    "deepseek_v2": {**_LATENT, "num_experts_per_tok": 2},
    "dots1": {"n_shared_experts": 1, "num_experts_per_tok": 2, "n_routed_experts": 4},
    "gemma3n_text": {**_SHARING, **_STREAMS},
    **{kind: {**_SHARING, "global_head_dim": 16} for kind in ("gemma4_text", "gemma4_unified_text")},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "llama4_text": {"layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]},
    "nemotron": {"num_key_value_heads": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 1},
}


def _further(kind: str, layers: int) -> dict[str, Any]:
    config = AutoConfig.for_model(kind).get_text_config()
    known = {name: getattr(config, name, None) for name in config.attribute_map} | config.to_dict()
    own = dict(_FURTHER[kind])
    if mixed := own.pop("mixed", None):
        own["layer_types"] = _alternating(layers, mixed)
    if kind == "gpt_neo":
        own["attention_types"] = [[["global", "local"], layers // 2]]
    own |= {name: (own[name] * layers)[:layers] for name in _EACH_LAYER if name in own}
    if sharing := own.get("num_kv_shared_layers"):
        own["num_kv_shared_layers"] = min(sharing, layers - 2)
    fields = {name: value for name, value in _TINY.items() if known.get(name) is not None}
    return {**fields, **own}


NAMES: list[str] = list(_TABLE)
FURTHER: list[str] = list(_FURTHER)
"""Types that are tested by their conformance alone."""
HYBRIDS: list[str] = list(_HYBRID)
"""Those among them that mix attention with layers whose states have no positions."""
TYPES: set[str] = {kind for kind, _, _ in _TABLE.values()} | {*FURTHER}


EAGER_ONLY = ("gemma2",)

# what carries a sublayer's contribution into the residual stream: output projections, or the norms that follow them
_OUTPUTS = ("o_proj", "down_proj", "c_proj", "out_proj", "fc2", "dense", "dense_4h_to_h")
# sharp attention and small position embeddings: the text depends on its context and does not loop at once
_GAIN = dict.fromkeys(("q_proj", "k_proj", "qkv_proj", "query_key_value", "c_attn"), 2.5) | {
    **dict.fromkeys(("o_proj", "out_proj", "attn.c_proj", "dense."), 2.0),
    **dict.fromkeys(("wpe", "embed_positions"), 3.0),
}
_OUTPUT_NORMS = {
    "gemma2": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "gemma3_text": ("post_attention_layernorm", "post_feedforward_layernorm"),
    "olmo2": ("post_attention_layernorm", "post_feedforward_layernorm"),
}


def build(name: str, *, layers: int = 4, seed: int = 0, vocab: int = 97, **overrides: Any) -> PreTrainedModel:
    """A fresh model in eval mode, float32. overrides: config fields, `attn_implementation` among them."""
    if name in _FURTHER:
        kind, settings = name, _further(name, layers)
    else:
        kind, fields, more = _TABLE[name]
        settings = {**fields, **(more(layers) if more else {})}
    whole = _usual_config(kind)
    settings[whole.get_text_config().attribute_map.get("num_hidden_layers", "num_hidden_layers")] = layers
    tokens = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
    own_ids = {field: settings[field] for field in tokens if field in settings}
    settings = {**settings, "vocab_size": vocab, "tie_word_embeddings": False, **tokens, **own_ids, **overrides}
    attention = settings.pop("attn_implementation", "eager" if name in EAGER_ONLY else None if name in _FURTHER else "sdpa")
    config = AutoConfig.for_model(kind, **_nested(whole, settings))
    with torch.random.fork_rng(devices=[]):  # the decays of linear attention are drawn by its model
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    _initialise(model, torch.Generator().manual_seed(seed), float(not config.get_text_config().tie_word_embeddings))
    return model.eval()


_usual_config = functools.cache(AutoConfig.for_model)


def _nested(whole: Any, settings: dict[str, Any]) -> dict[str, Any]:
    text = whole.get_text_config()
    place = next((name for name in whole.sub_configs if getattr(whole, name) is text), None)
    return settings if place is None else {place: type(text)(**settings).to_dict()}


@functools.cache
def cached(name: str) -> PreTrainedModel:
    """`build(name)`, made once. Shared between tests: whoever changes it puts it back. Its family is derived and verified, so
    that no forward of that is counted in a test."""
    model = build(name)
    ModelRunner(model, "eager")
    return model


@functools.cache
def near(name: str) -> PreTrainedModel:
    """A draft model that is often right and often wrong: the model itself, its head a little off."""
    model = build(name)
    with torch.no_grad():
        head: Any = model.get_output_embeddings()
        head.weight += 0.1 * head.weight.std() * torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(3))
    return model


def prompts(rows: int, vocab: int = 97, longest: int = 21, seed: int = 1) -> list[Tensor]:
    """Random prompts [T] of different lengths, the first one the longest; token 0 (the padding) does not occur."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [max(1, longest - 7 * row) for row in range(rows)]
    return [torch.randint(1, vocab, (length,), generator=generator) for length in lengths]


def padded(rows: Sequence[Tensor], pad: int = 0) -> dict[str, Tensor]:
    """input_ids and attention_mask [B, T] as a tokenizer with padding_side="left" makes them."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), pad)
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, width - len(tokens) :] = tokens
        mask[row, width - len(tokens) :] = 1
    return {"input_ids": ids, "attention_mask": mask}


@torch.no_grad()
def _initialise(model: PreTrainedModel, generator: torch.Generator, untied: float) -> None:
    """Weights that make every part of the model matter: transformers' own (std .02) leave tiny models almost linear."""
    _, _, blocks = find_layers(model, text_config(model))
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1 or "norm" in name:
            parameter.add_(0.2 * noise + float("q_norm" in name or "k_norm" in name))
        else:
            gain = next((gain for part, gain in _GAIN.items() if part in name), 1.0)
            parameter.copy_(gain * noise * parameter.shape[-1] ** -0.5)
    norms = _OUTPUT_NORMS.get(model.config.model_type, ())
    for block in list(blocks)[len(blocks) // 2 :]:
        for path, module in block.named_modules():
            _weaken(model.config, path.rsplit(".", 1)[-1], module, norms)
    if untied:
        head: Any = model.get_output_embeddings()
        head.weight.mul_(8)


def _weaken(config: Any, name: str, module: Any, norms: tuple[str, ...]) -> None:
    """Scale what a sublayer adds to the residual stream by .45 (less where a norm follows the sum and undoes half of it)."""
    factor = 0.45 if getattr(config, "do_layer_norm_before", True) else 0.15
    if norms:
        if name in norms:
            offset = 1 if config.model_type.startswith("gemma") else 0  # Gemma's norms multiply by 1 + weight
            module.weight.add_(offset).mul_(factor).sub_(offset)
    elif name in _OUTPUTS:
        for parameter in module.parameters():
            parameter.mul_(factor)
    elif name == "experts" and hasattr(module, "down_proj"):
        module.down_proj.mul_(factor)


def mapped(model: PreTrainedModel) -> MappedModel:
    """The same model without transformers, from a folder that is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder, max_shard_size="40KB")
        return mapped_from(Path(folder))


def mapped_from(folder: Path, dtype: torch.dtype | None = None) -> MappedModel:
    """The model of a folder, without transformers."""
    config = MappedConfig(json.loads((folder / "config.json").read_text()))
    return MappedModel(config, weight_files(folder), GenerationFields.of_config(config.to_dict()), dtype)
