"""Models in GGUF files by llama.cpp's conventions have the logits of transformers' models."""

from pathlib import Path
from typing import Any

import pytest
import torch

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.gguf.reader import GgufError, GgufFile
from skipstone.models.mapped_config import UnmappableError
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
LONGROPE = {
    **{"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [2.0, 3.0, 5.0, 8.0]},
    **{"original_max_position_embeddings": 64, "attention_factor": 1.19},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied, wide heads": ("llama", {"tie_word_embeddings": True, "head_dim": 12}),
    "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0, **LLAMA3}}),
    "llama linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral with windows": ("mistral", {"sliding_window": families.WINDOW}),
    "qwen2": ("qwen2", {"use_sliding_window": False}),
    "qwen3": ("qwen3", {"use_sliding_window": False}),
    "smollm3": ("smollm3", {"use_sliding_window": False, "no_rope_layer_interval": 4}),
    "granite": ("granite", {}),
    "olmo2": ("olmo2", {}),
    "phi3": ("phi3", {}),
    "phi3 longrope": ("phi3", {"rope_parameters": LONGROPE, "max_position_embeddings": 256}),
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
    runner = ModelRunner(model, "native", compute_dtype="float32")
    positions = torch.arange(ids.shape[1])[None]
    store = KVCache(1, runner.depth, ids.shape[1])
    store.reserve(ids.shape[1])
    at = Pass(positions, positions, None, slice(0, 1), ids.shape[1], 0)
    return runner.logits(runner.run(runner.embed(ids, positions), at, store, range(runner.depth)))[0]


REFUSED: dict[str, tuple[str, str, Any]] = {
    "sizes by layer": ("feed_forward_length", [64] * 4, "no single number feed_forward_length"),
    "more layers than tensors": ("block_count", 10**9, "fewer than it says"),
    "no heads": ("attention.head_count", 0, "has no layers, heads"),
    "an odd head": ("attention.key_length", 7, "heads of an odd size"),
    "YaRN": ("rope.scaling.type", "yarn", "scaled by 'yarn'"),
    "several scalings": ("rope.scaling.type", ["none", "linear"], "scaled by"),
    "amplified scores": ("rope.scaling.attn_factor", 1.2, "amplified"),
    "both directions": ("attention.causal", False, "attention to later tokens"),
    "partial rotation": ("rope.dimension_count", 4, "partial rotary phases"),
    "no rotation": ("rope.dimension_count", 0, "rotates 0 numbers"),
    "too wide a rotation": ("rope.dimension_count", 16, "rotates 16 numbers"),
    "no epsilon": ("attention.layer_norm_rms_epsilon", None, "no single number"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_does_not_know_is_refused(reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key, value, message = REFUSED[reason]
    path = write_model(tmp_path / "model.gguf", families.cached("llama")).path
    read = GgufFile.__init__

    def changed(self: GgufFile, path: Path) -> None:
        read(self, path)
        self.metadata[f"llama.{key}"] = value

    monkeypatch.setattr(GgufFile, "__init__", changed)
    with pytest.raises(GgufError, match=rf"{message}.*: load the model's safetensors"):
        load_model(path, "auto")  # not by transformers, which ignores what it does not know


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "rope_factors_long.weight", "blk.9.attn_q.weight"])
def test_a_tensor_too_many_is_refused(name: str, tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", families.cached("llama"), further={name: torch.ones(4, 4).numpy()}).path
    with pytest.raises(GgufError, match=r"tensors that are not in its config|do not fit its architecture"):
        map_gguf(path)


def test_other_architectures_are_left_to_transformers(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model.gguf", families.cached("llama"), architecture="plamo").path
    with pytest.raises(UnmappableError, match="architecture 'plamo'"):
        map_gguf(path)
