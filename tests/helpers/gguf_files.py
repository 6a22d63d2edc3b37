"""Writes models into GGUF files by llama.cpp's conventions, with the gguf package: conversion/*.py of llama.cpp."""

import copy
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.helpers import families
from tests.helpers.ggml_blocks import SCALES

KINDS = gguf.GGMLQuantizationType
ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
"""llama.cpp's names of architectures, where they are not transformers' model types."""
STEPS = {"Q4_K": (4e-4, 7.5), "Q5_K": (2e-4, 15.5), "Q6_K": (5e-5,), "IQ4_NL": (1e-3,)}
"""Sizes of the scales in a block for weights of about 1/16; the second is that of the minima, in the first, for a mean of 0."""
FIELDS = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "head_count": "num_attention_heads",
    "head_count_kv": "num_key_value_heads",
    "layer_norm_rms_eps": "rms_norm_eps",
}
GRANITE = {
    "attention_scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


BLOCK_SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
"""Config fields with which the rows of all matrices fit every type of blocks."""
GEMMA = {"query_pre_attn_scalar": 64, "layer_types": None, "tie_word_embeddings": True}
BLOCK_MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": False},
    "gemma3_text": GEMMA,
    "phi3": {},
}
"""Families and config fields: permuted queries and keys, biases, a tied head, fused matrices."""


class WrittenModel(NamedTuple):
    """path: of the file. model: transformers' model with the values that the file stands for, in float32."""

    path: Path
    model: Any


def write_model(
    path: Path,
    model: PreTrainedModel,
    kind: str = "F32",
    architecture: str | None = None,
    further: dict[str, NDArray[Any]] | None = None,
) -> WrittenModel:
    """Write a model with a tokenizer of single bytes. kind: of its matrices; those with rows that it does not fit are F32.
    architecture: a name to write, for one that the model does not have. further: tensors that are added."""
    model = copy.deepcopy(model).float()
    config: Any = model.config
    kind_of_model = ARCHITECTURES.get(config.model_type, config.model_type)
    writer = gguf.GGUFWriter(path, architecture or kind_of_model)
    write_config(writer, config)
    write_bytes_tokenizer(writer, config.vocab_size)
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == kind_of_model)
    titles = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    offset = 1.0 if config.model_type.startswith("gemma") else 0.0
    for seed, (name, weight) in enumerate(model.named_parameters()):  # a tied head is not among them
        values, used = weight.detach().numpy(), KINDS.F32
        if values.ndim == 2 and values.shape[1] % gguf.GGML_QUANT_SIZES[KINDS[kind]][0] == 0:
            used = KINDS[kind]
        elif name.endswith("norm.weight"):
            values = values + np.float32(offset)
        blocks = blocks_of(values, used, seed)
        if values.ndim == 2:
            weight.data = torch.from_numpy(np.array(gguf.quants.dequantize(blocks, used), dtype=np.float32))
        title = titles.get_name(name, try_suffixes=(".weight", ".bias"))
        assert title, name
        writer.add_tensor(title, interleaved(blocks, name, config), raw_dtype=used)
    if (rope := getattr(config, "rope_parameters", {})).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", rope_factors(config, rope))
    for length in ("short", "long") if rope.get("rope_type") == "longrope" else ():
        writer.add_tensor(f"rope_factors_{length}.weight", np.float32(rope[f"{length}_factor"]))
    for name, values in (further or {}).items():
        writer.add_tensor(name, values)
    finish(writer)
    return WrittenModel(path, model)


def write_blocks(folder: Path, name: str, kind: str, layers: int = 4) -> WrittenModel:
    """A model of a family of BLOCK_MODELS. kind: of its matrices."""
    return write_model(folder / f"{kind}.gguf", families.build(name, layers=layers, **BLOCK_SIZES, **BLOCK_MODELS[name]), kind)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_config(writer: Any, config: Any) -> None:
    """The hyper-parameters of a config, as far as llama.cpp's converter writes them."""
    kind, rope = config.model_type, config.rope_parameters
    for key, field in FIELDS.items():
        getattr(writer, f"add_{key}")(getattr(config, field))
    if kind not in ("gemma2", "gemma3_text"):
        writer.add_vocab_size(config.vocab_size)
    if (size := getattr(config, "head_dim", None)) is not None and kind != "granite":
        writer.add_key_length(size)
        writer.add_value_length(size)
    size = size or config.hidden_size // config.num_attention_heads
    rope = rope.get("full_attention", rope)
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType[rope["rope_type"].upper()])
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_attn_factors(rope["attention_factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    for key, field in GRANITE.items() if kind == "granite" else ():
        getattr(writer, f"add_{key}")(getattr(config, field))
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    if getattr(config, "final_logit_softcapping", None):
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if kind in ("mistral", "gemma2", "gemma3_text", "phi3"):
        writer.add_sliding_window(config.sliding_window or 0)


def write_bytes_tokenizer(writer: Any, size: int) -> None:
    """A BPE tokenizer of single characters and AB, with as many tokens."""
    tokens = [*(chr(code) for code in range(33, 33 + size - 1)), "AB"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([token if token.isprintable() else f"<{token!r}>" for token in tokens])
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["A B"])


def blocks_of(values: NDArray[np.float32], kind: Any, seed: int = 0) -> NDArray[Any]:
    """Values in a type of blocks. Types that the gguf package cannot write get random blocks with small scales."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        return random_blocks(values.shape, kind, seed)


def random_blocks(shape: tuple[int, ...], kind: Any, seed: int = 0) -> NDArray[np.uint8]:
    """[outputs, bytes of a row]"""
    draw = np.random.default_rng(seed)
    inputs, nbytes = gguf.GGML_QUANT_SIZES[kind]
    blocks = draw.integers(0, 256, (shape[0], shape[1] // inputs, nbytes), dtype=np.uint8)
    scales = draw.uniform(0.5, 1.0, blocks.shape[:2])
    if kind.name in ("Q4_K", "Q5_K"):  # the minima's 6-bit numbers are the scales'
        blocks[..., 8:12], blocks[..., 12:16] = blocks[..., 4:8], 17 * (blocks[..., 12:16] & 15)
    for place, step in zip(SCALES.get(kind.name, (0,)), STEPS.get(kind.name, (1e-4, 1.0)), strict=False):
        scales = scales * step
        blocks[..., place : place + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def interleaved(rows: NDArray[Any], name: str, config: Any) -> NDArray[Any]:
    """llama.cpp keeps the two halves of a rotated head side by side, in files of these types."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None or config.model_type not in ("llama", "mistral", "smollm3", "granite"):
        return rows
    return rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape).copy()


def rope_factors(config: Any, rope: dict[str, Any]) -> NDArray[np.float32]:
    """The divisors of the rotary frequencies."""
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = rope["rope_theta"] ** -(torch.arange(len(scaled)).double() / len(scaled))
    return (plain / scaled).float().numpy()
