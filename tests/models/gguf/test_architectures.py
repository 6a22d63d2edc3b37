"""Models in GGUF files by llama.cpp's conventions have the logits of transformers' models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.gguf.architectures import config_values
from skipstone.models.gguf.reader import GgufFile
from skipstone.models.mapped_config import MappedConfig, UnmappableError
from skipstone.models.mapped_gguf import map_gguf
from skipstone.models.passes import Pass
from skipstone.models.unpacked_gguf import load_model
from tests.helpers import families
from tests.helpers.gguf_files import write_model

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
GEMMA = {"layer_types": None, "sliding_window": families.WINDOW, "head_dim": 12, "query_pre_attn_scalar": 12}
LINEAR = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, wide heads": ("llama", {"tie_word_embeddings": True, "head_dim": 12}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0, **LLAMA3}}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"use_sliding_window": False}),
    "smollm3": ("smollm3", {"use_sliding_window": False, "no_rope_layer_interval": 4}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "gemma": ("gemma", {"tie_word_embeddings": True}),
    "gemma2": ("gemma2", {**GEMMA, "tie_word_embeddings": True}),
    "gemma3": ("gemma3_text", {**GEMMA, "tie_word_embeddings": True}),
    "gemma3 linear": ("gemma3_text", {**GEMMA, "rope_parameters": LINEAR}),
}


@pytest.mark.parametrize(("variant", "kind"), [*((one, "F32") for one in MODELS), ("llama", "F16"), ("gemma3", "BF16")])
def test_its_logits_are_those_of_transformers(variant: str, kind: str, tmp_path: Path) -> None:
    name, values = MODELS[variant]
    path, expected = write_model(tmp_path / "model.gguf", families.build(name, layers=7, **values), kind)
    ids = torch.randint(97, (1, 40), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        logits = expected(ids).logits[0]
        unpacked = load_model(path, "auto")(ids).logits[0]
    found, from_modules = logits_of(map_gguf(path)[0], ids), logits_of(expected, ids)
    assert torch.allclose(found, logits, atol=1e-3)
    assert torch.allclose(unpacked, logits, atol=1e-3)
    if variant != "llama3":  # a file has quotients of its frequencies, which are rounded
        assert torch.equal(found, from_modules)


def logits_of(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """[T, V]"""
    runner = ModelRunner(model, "native")
    positions = torch.arange(ids.shape[1])[None]
    store = KVCache(1, runner.depth, ids.shape[1])
    store.reserve(ids.shape[1])
    at = Pass(positions, positions, None, slice(0, 1), ids.shape[1], 0)
    return runner.logits(runner.run(runner.embed(ids, positions), at, store, range(runner.depth)))[0]


REFUSED: dict[str, tuple[str, str, Any]] = {
    "an unknown architecture": ("general.architecture", "plamo", "architecture 'plamo'"),
    "sizes by layer": ("llama.feed_forward_length", [64] * 4, "no single number feed_forward_length"),
    "more layers than tensors": ("llama.block_count", 10**9, "fewer than it says"),
    "no heads": ("llama.attention.head_count", 0, "has no layers, heads"),
    "YaRN": ("llama.rope.scaling.type", "yarn", "scaled by 'yarn'"),
    "amplified scores": ("llama.rope.scaling.attn_factor", 1.2, "amplified"),
    "both directions": ("llama.attention.causal", False, "attention to later tokens"),
    "partial rotation": ("llama.rope.dimension_count", 4, "partial rotary phases"),
    "a window": ("llama.attention.sliding_window", 8, "windows"),
    "no epsilon": ("llama.attention.layer_norm_rms_epsilon", None, "no single number"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_know_is_left_to_transformers(reason: str, tmp_path: Path) -> None:
    key, value, message = REFUSED[reason]
    file = GgufFile(write_model(tmp_path / "model.gguf", families.cached("llama")).path)
    file.metadata[key] = value
    with pytest.raises(UnmappableError, match=message):
        MappedConfig(config_values(file))


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "rope_factors_long.weight", "blk.9.attn_q.weight"])
def test_a_tensor_too_many_is_left_to_transformers(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", families.cached("llama"), further={name: torch.ones(4, 4).numpy()}).path
    with pytest.raises(UnmappableError, match="tensors that are not in its config"):
        map_gguf(path)
