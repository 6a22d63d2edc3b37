"""A model without transformers against transformers' own: every field of its config, and the bits of its logits."""

import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from skipstone.engines import mapped_loading
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.layer_variants import LAYER_VARIANTS
from skipstone.models.mapped_config import ALWAYS_NAME_KEY_HEADS, DEFAULTS, MappedConfig, UnmappableError
from skipstone.models.mapped_model import OverwrittenCheckpointError
from skipstone.models.passes import Pass
from skipstone.utils import progress
from tests.helpers import families
from tests.helpers.support import tokenizer

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
LINEAR = {"rope_type": "linear", "factor": 4.0}
CONFIGS: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in DEFAULTS),
    *((kind, {"num_key_value_heads": None}) for kind in DEFAULTS if kind not in ALWAYS_NAME_KEY_HEADS),
    *(
        ("llama", values)
        for values in ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, {"head_dim": 48})
    ),
    *(("llama", {name: {"type": "linear", "factor": 2.0}}) for name in ("rope_scaling", "rope_parameters")),
    *(("qwen2", {"use_sliding_window": True, "max_window_layers": layers}) for layers in (0, 30)),
    *(("mistral", {"sliding_window": None}), ("phi3", {"sliding_window": 77, "partial_rotary_factor": 0.5})),
    *(("smollm3", values) for values in ({"no_rope_layer_interval": 3}, {"use_sliding_window": True, "sliding_window": 9})),
    *(("gemma3_text", {"rope_scaling": LINEAR}), ("gemma3_text", {"sliding_window_pattern": 2, "rope_local_base_freq": 99.0})),
    *(("gemma3_text", {"rope_parameters": {"full_attention": LINEAR}}), ("gemma2", {"layer_types": ["full_attention"] * 26})),
]


@pytest.mark.parametrize(("kind", "values"), CONFIGS, ids=str)
def test_a_config_is_completed_as_transformers_completes_it(kind: str, values: dict[str, Any]) -> None:
    expected: Any = AutoConfig.for_model(kind, **json.loads(json.dumps(values)))
    config = MappedConfig({"model_type": kind, **values})
    for name in {*DEFAULTS[kind], "rope_parameters", "vocab_size", "num_key_value_heads", "hidden_size", "eos_token_id"}:
        assert getattr(config, name) == getattr(expected, name), name
    assert config.head_dim == getattr(expected, "head_dim", expected.hidden_size // expected.num_attention_heads)


REFUSED: list[dict[str, Any]] = [
    *({"model_type": "gpt2"}, {"quantization_config": {}}, {"hidden_size": "32"}, {"num_hidden_layers": 0}),
    *({"model_type": kind, "num_key_value_heads": None} for kind in ALWAYS_NAME_KEY_HEADS),
    *({"num_key_value_heads": 3}, {"hidden_act": "relu"}, {"rms_norm_eps": -1.0}, {"sliding_window": 8}),
    *({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, {"rope_scaling": {"rope_type": "llama3"}}),
    *({"layer_types": ["sliding_attention"] * 32}, {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 32}),
    *({"model_type": "qwen2", "layer_types": ["full_attention"] * 31}, {"max_position_embeddings": -5}),
    *({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.5}}),
]


@pytest.mark.parametrize("values", REFUSED, ids=str)
def test_what_it_does_not_know_is_left_to_transformers(values: dict[str, Any]) -> None:
    with pytest.raises(UnmappableError):
        MappedConfig({"model_type": "llama", **values})


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in LAYER_VARIANTS},
    "biased llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "biased olmo2": ("olmo2", {"attention_bias": True}),
    "tied llama": ("llama", {"tie_word_embeddings": True}),
    "llama3": ("llama", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 100.0, **LLAMA3}}),
    "linear": ("llama", {"rope_parameters": {"rope_theta": 100.0, **LINEAR}}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_its_logits_have_the_bits_of_the_loaded_model(variant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    name, values = VARIANTS[variant]
    own = families.build(name, vocab=97, **values).to(dtype)
    own.save_pretrained(tmp_path, max_shard_size="40KB")
    loaded = type(own).from_pretrained(tmp_path, dtype="auto").eval()
    ids = families.prompts(1)[0][None]
    runners = ModelRunner(loaded, "native"), ModelRunner(model := families.mapped_from(tmp_path), "native")
    logits = [runner.logits(runner.run(*_whole(runner, ids))) for runner in runners]
    assert torch.equal(*logits)
    assert runners[0].fingerprint == runners[1].fingerprint
    assert model.dtype == dtype
    assert dict(model.named_parameters()).keys() == dict(loaded.named_parameters()).keys()


def _whole(runner: ModelRunner, ids: torch.Tensor) -> tuple[Any, ...]:
    positions = torch.arange(ids.shape[1])[None]
    store = KVCache(1, runner.depth, ids.shape[1])
    store.reserve(ids.shape[1])
    at = Pass(positions, positions, None, slice(0, 1), ids.shape[1], 0)
    return runner.embed(ids, positions), at, store, range(runner.depth)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_stored_weights_are_widened(stored: torch.dtype, tmp_path: Path) -> None:
    own = families.build("llama").to(stored)
    own.save_pretrained(tmp_path)
    ids = families.prompts(1)[0][None]
    loaded = type(own).from_pretrained(tmp_path, dtype=torch.float32).eval()
    runners = ModelRunner(loaded, "native"), ModelRunner(families.mapped_from(tmp_path, torch.float32), "native")
    logits = [runner.logits(runner.run(*_whole(runner, ids))) for runner in runners]
    assert torch.equal(*logits)
    with pytest.raises(UnmappableError):
        families.mapped_from(tmp_path, torch.bfloat16 if stored == torch.float16 else torch.float16)


@pytest.mark.parametrize(
    "change", ["a weight missing", "a weight too many", "another shape", "whole numbers", "other tied weights"]
)
def test_other_tensors_than_the_config_says_are_left_to_transformers(change: str, tmp_path: Path) -> None:
    model: Any = families.build("llama", tie_word_embeddings=change == "other tied weights")
    tensors = {name: one.detach().clone() for name, one in model.state_dict().items()}
    if change == "a weight missing":
        del tensors["model.layers.1.mlp.up_proj.weight"]
    elif change == "a weight too many":
        tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(64)
    elif change in ("another shape", "whole numbers"):
        tensors["model.norm.weight"] = torch.zeros(31) if change == "another shape" else torch.ones(32, dtype=torch.int8)
    else:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1
    model.config.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UnmappableError):
        families.mapped_from(tmp_path)
    if change == "other tied weights":
        save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors")
        families.mapped_from(tmp_path)


@pytest.mark.parametrize("change", ["written into", "cut off", "replaced"])
def test_a_checkpoint_that_is_overwritten_is_refused_at_the_next_request(change: str, tmp_path: Path) -> None:
    families.build("llama").save_pretrained(tmp_path)
    model, path = families.mapped_from(tmp_path), tmp_path / "model.safetensors"
    ModelRunner(model)
    data = path.read_bytes()
    if change == "replaced":  # the old file lives on while it is mapped
        (tmp_path / "new").write_bytes(bytes(len(data)))
        os.replace(tmp_path / "new", path)
        ModelRunner(model)
        assert not model.files.is_current()
        return
    path.write_bytes(data if change == "written into" else data[:-1000])
    with pytest.raises(OverwrittenCheckpointError, match="was overwritten while it was in use: load it again"):
        ModelRunner(model)


def test_a_file_that_is_cut_off_while_it_is_packed_is_an_error(tmp_path: Path) -> None:
    families.build("llama").save_pretrained(tmp_path)
    model = families.mapped_from(tmp_path)
    model.report_packed = lambda _: os.truncate(tmp_path / "model.safetensors", 4096)
    with pytest.raises(OSError, match="changed while it was loaded"):
        ModelRunner(model, "native")


def test_too_little_memory_is_a_sentence_with_the_need_and_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.build("llama").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(mapped_loading, "available_memory_bytes", lambda: 100)
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "cache"))
    for quantize in (None, "int8"):
        with pytest.raises(ValueError, match=r"need .* GB of memory, and 0\.0 GB are free: .* int4 needs"):
            mapped_loading.load_for_decoding(tmp_path, quantize=quantize)
    with monkeypatch.context() as patch:
        patch.setattr(mapped_loading, "available_memory_bytes", lambda: 1 << 30)
        mapped_loading.load_for_decoding(tmp_path, quantize="int8")
    mapped_loading.load_for_decoding(tmp_path, quantize="int8")  # which maps the panels that were written


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("hidden_seconds", "is_terminal"), [(0, True), (0, False), (60, True)])
def test_packing_and_writing_show_their_progress_on_a_terminal_if_they_are_slow(
    tied: bool, hidden_seconds: float, is_terminal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    families.build("llama", tie_word_embeddings=tied).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    monkeypatch.setattr(progress, "HIDDEN_SECONDS", hidden_seconds)
    monkeypatch.setattr(sys, "stderr", written := io.StringIO())
    monkeypatch.setattr(written, "isatty", lambda: is_terminal, raising=False)
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "cache"))
    model, _ = mapped_loading.load_for_decoding(tmp_path, quantize="int4")
    is_shown = hidden_seconds == 0 and is_terminal
    assert (written.getvalue()[-4:] == "\r\x1b[K") == is_shown
    for title in ("packing the weights", "writing the quantised weights"):
        shares = [int(share) for share in re.findall(rf"\r{title}: (\d+) %", written.getvalue())]
        assert shares == sorted(shares)
        assert shares[-1:] == ([100] if is_shown else [])
    assert model.report_packed is None
