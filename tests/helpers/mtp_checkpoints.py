"""Tiny random checkpoints with layers for multi-token prediction (MTP), in the layouts of published files.

DeepSeek-V3 and GLM: `model.layers.{N}.*` after the last of N layers. Qwen: `mtp.*`, with norms stored as offsets from one.
"""

import copy
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tests.helpers.feature_heads import random_matrix, read_weights, write_weights

QWEN = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
MTP_KINDS = ("deepseek_v3", "glm4_moe", "glm4_moe_lite", *QWEN)
"""Model types that have MTP layers in one of the layouts here."""
_SHAPE: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "max_position_embeddings": 2048},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False},
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
_ROUTED = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
_LINEAR = {
    **{"head_dim": 16, "num_key_value_heads": 2, "linear_num_value_heads": 4, "linear_num_key_heads": 2},
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
}
_FIELDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {**_ROUTED, **_LATENT, "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "glm4_moe": {
        **{**_ROUTED, "num_key_value_heads": 2, "first_k_dense_replace": 1, "head_dim": 8},
        **{"attention_bias": True, "use_qk_norm": True},
    },
    "glm4_moe_lite": {**_ROUTED, **_LATENT, "num_key_value_heads": 4},
    "qwen3_next": {**_LINEAR, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": {**_LINEAR, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24},
}
_GAIN = {"q_proj": 1.7, "k_proj": 1.7, "q_b_proj": 1.7, "v_proj": 2.0, "down_proj": 2.0, "lm_head": 3.0}


@dataclass(frozen=True)
class MtpOptions:
    """A checkpoint with an MTP layer.

    layers: N, of the target. mtp_layers: how many follow. copies: what the file has for the layer's own embedding and LM head
    (not in Qwen's layout): "absent", "same" as the target's, or "other" values. shared_norm: whether the file has the norm
    before the head; else it is the target's. fused: experts in one tensor each. wrapped: Qwen3.5's file of a multimodal model,
    with `model.language_model.*`. files: how many files the tensors are in.
    """

    layers: int = 4
    vocab: int = 97
    mtp_layers: int = 1
    copies: Literal["absent", "same", "other"] = "absent"
    shared_norm: bool = True
    fused: bool = False
    wrapped: bool = False
    files: int = 1
    dtype: torch.dtype = torch.float32
    seed: int = 0


def mtp_checkpoint(path: Path, kind: str, **options: Any) -> Path:
    """Write a target of a type with its MTP layers. options: of `MtpOptions`."""
    chosen = MtpOptions(**options)
    target = tiny_target(kind, chosen.layers, chosen.vocab, chosen.seed).to(chosen.dtype)
    return add_mtp_layers(path, target, chosen)


def tiny_target(kind: str, layers: int = 4, vocab: int = 97, seed: int = 0) -> PreTrainedModel:
    """A random model of a type, in float32."""
    fields = {**_SHAPE, **_FIELDS[kind], "num_hidden_layers": layers, "vocab_size": vocab}
    if kind in QWEN:
        fields["layer_types"] = [("linear_attention", "full_attention")[layer % 2] for layer in range(layers)]
    return _random_model(AutoConfig.for_model(kind, **fields), seed)


def block_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of a model that has an MTP layer's decoder layer as its only layer: full attention, experts where the type
    has them."""
    single: Any = copy.deepcopy(config.get_text_config())
    single.num_hidden_layers = 1
    for name, value in (
        *(("layer_types", ["full_attention"]), ("mlp_layer_types", ["sparse"])),
        *(("first_k_dense_replace", 0), ("mlp_only_layers", [])),
    ):
        if hasattr(single, name):
            setattr(single, name, value)
    return single


def add_mtp_layers(path: Path, target: PreTrainedModel, options: MtpOptions) -> Path:
    """Save a target with random MTP layers."""
    config: Any = target.config
    target.save_pretrained(path)
    weights = read_weights(path)
    for index in range(options.mtp_layers):
        added = _mtp_weights(target, index, options)
        weights |= {name: weight.to(options.dtype) for name, weight in added.items()}
    written = json.loads((path / "config.json").read_text())
    if config.model_type not in QWEN:
        written["num_nextn_predict_layers"] = options.mtp_layers
    elif config.model_type != "qwen3_next":
        written |= {"mtp_num_hidden_layers": options.mtp_layers, "mtp_use_dedicated_embeddings": False}
    if options.wrapped:
        written = _wrapped_config(written)
        weights = {name.replace("model.", "model.language_model.", name.startswith("model.")): w for name, w in weights.items()}
        weights["model.visual.patch_embed.proj.bias"] = torch.ones(4)
    (path / "config.json").write_text(json.dumps(written, indent=1))
    _write_files(path, weights, options.files)
    return path


def _wrapped_config(text: dict[str, Any]) -> dict[str, Any]:
    kind = text["model_type"].removesuffix("_text")
    architecture = text["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "depth": 1, "out_hidden_size": 32}
    return {"architectures": [architecture], "model_type": kind, "text_config": text, "vision_config": vision}


def _write_files(path: Path, weights: dict[str, Tensor], files: int) -> None:
    """One file, or several with an index, as hubs have them. The MTP layers are last."""
    if files == 1:
        write_weights(path, weights)
        return
    (path / "model.safetensors").unlink()
    names, index = list(weights), dict[str, str]()
    for number in range(files):
        file = f"model-{number + 1:05}-of-{files:05}.safetensors"
        part = names[number * len(names) // files : (number + 1) * len(names) // files]
        save_file({name: weights[name].contiguous().clone() for name in part}, path / file, {"format": "pt"})
        index |= dict.fromkeys(part, file)
    total = sum(weight.nbytes for weight in weights.values())
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": index}))


def _mtp_weights(target: PreTrainedModel, index: int, options: MtpOptions) -> dict[str, Tensor]:
    config: Any = target.config
    seed, size = 1000 + 10 * options.seed + index, config.hidden_size
    with tempfile.TemporaryDirectory() as folder:
        _random_model(block_config(config), seed).save_pretrained(folder)
        saved = read_weights(Path(folder))
    mark = "model.layers.0."
    block = {name.removeprefix(mark): weight for name, weight in saved.items() if name.startswith(mark)}
    if options.fused:
        block = _fused(block)
    generator = torch.Generator().manual_seed(seed)

    def norm() -> Tensor:
        return float(config.model_type not in QWEN) + 0.3 * torch.randn(size, generator=generator)

    joined = random_matrix(generator, size, 2 * size, 1.4)
    if config.model_type in QWEN:
        own = {f"mtp.{name}.weight": norm() for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
        shared = {} if index else {**own, "mtp.fc.weight": joined}
        return {**shared, **{f"mtp.layers.{index}.{name}": weight for name, weight in block.items()}}
    block |= {"enorm.weight": norm(), "hnorm.weight": norm(), "eh_proj.weight": joined}
    if options.shared_norm:
        block["shared_head.norm.weight"] = norm()
    if options.copies != "absent":
        for name, module in (
            ("embed_tokens", target.get_input_embeddings()),
            ("shared_head.head", target.get_output_embeddings()),
        ):
            weight: Any = module.weight
            block[f"{name}.weight"] = weight.detach() if options.copies == "same" else weight.detach().flip(0)
    return {f"model.layers.{options.layers + index}.{name}": weight for name, weight in block.items()}


def _fused(block: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts as one tensor each: gate and up [E, 2 * f, d], down [E, d, f]."""
    fused = {name: weight for name, weight in block.items() if ".experts." not in name}
    count = sum(name.endswith(".down_proj.weight") and ".experts." in name for name in block)
    gate, up, down = (
        torch.stack([block[f"mlp.experts.{i}.{name}_proj.weight"] for i in range(count)]) for name in ("gate", "up", "down")
    )
    return {**fused, "mlp.experts.gate_up_proj": torch.cat([gate, up], 1), "mlp.experts.down_proj": down}


@torch.no_grad()
def _random_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Weights that make every part count. Linear attention keeps the decays that it draws."""
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for name, parameter in (*model.named_parameters(), *model.named_buffers()):
        noise = torch.randn(parameter.shape, generator=generator)
        if "embed_tokens" in name:
            parameter.copy_(noise)
        elif parameter.ndim >= 2:
            gain = next((gain for part, gain in _GAIN.items() if part in name), 1.0)
            parameter.copy_(noise * gain * parameter.shape[-1] ** -0.5)
        elif "norm" in name or name.endswith(("proj.bias", "correction_bias")):
            parameter.add_(0.3 * noise)  # norms are made of ones, or of zeros if they are offsets
    return model.eval()
