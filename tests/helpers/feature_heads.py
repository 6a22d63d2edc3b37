"""Tiny random folders of heads that draft from hidden states of a target, in the layouts of published files.

Every part counts: attention is sharp, norms have weights around 1 that differ from 1, and draft ids are not target ids.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

LLAMA3_ROPE: dict[str, Any] = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 64,
}
"""Rotary phases of Llama 3. Of the six frequencies of a head of size 12, some are scaled and one is in between."""


@dataclass(frozen=True)
class Eagle3Options:
    """A head of EAGLE-3. The flags have the names that config.json has for them.

    kind: "qwen3" has norms of queries and keys, "qwen2" has biases of queries, keys and values. draft_vocab: tokens that the
    head can draft; None: all. hidden_size: None: that of the target. layer_ids: what config.json lists; None: it lists none.
    embedding: "target": none in the file, "own": random, or the values [V, d]. lm_head: whether the file has one.
    prefix: of all names of tensors. old_rope: rope_theta and rope_scaling, as in files of transformers 4.
    """

    layout: Literal["eagle", "speculators"] = "eagle"
    file: Literal["safetensors", "bin"] = "safetensors"
    kind: Literal["llama", "qwen3", "qwen2"] = "llama"
    draft_vocab: int | None = 61
    hidden_size: int | None = None
    layer_ids: list[int] | None = None
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    embedding: Literal["target", "own"] | Tensor = "target"
    lm_head: bool = True
    rope_theta: float = 500.0
    rope_scaling: dict[str, Any] | None = None
    old_rope: bool = True
    prefix: str = ""
    architecture: str = "LlamaForCausalLMEagle3"
    dtype: torch.dtype = torch.float32
    seed: int = 0
    further: dict[str, Any] = field(default_factory=dict)
    """Further fields of config.json."""


def eagle3_folder(path: Path, target: Any, **options: Any) -> Path:
    """Write a head for a target. target: its config (of transformers, the text part). options: of `Eagle3Options`."""
    chosen = Eagle3Options(**options)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(_eagle3_config(target, chosen), indent=1))
    weights = _eagle3_weights(target, chosen)
    if chosen.layout == "eagle":
        weights = {name.replace("layers.0.", "midlayer."): weight for name, weight in weights.items()}
    write_weights(path, {chosen.prefix + name: weight for name, weight in weights.items()}, chosen.file)
    return path


def read_weights(path: Path) -> dict[str, Tensor]:
    """All tensors of a folder, from all its files."""
    weights: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        weights |= load_file(file)
    for file in sorted(path.glob("*.bin")):
        weights |= torch.load(file, weights_only=True)
    return weights


def write_weights(path: Path, weights: dict[str, Tensor], file: str = "safetensors") -> None:
    """One file with all tensors."""
    whole = {name: weight.contiguous().clone() for name, weight in weights.items()}
    if file == "bin":
        torch.save(whole, path / "pytorch_model.bin")
    else:
        save_file(whole, path / "model.safetensors", {"format": "pt"})


def edit_weights(path: Path, edit: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Change the tensors of a folder with one file: `edit` changes the dictionary in place."""
    weights = read_weights(path)
    edit(weights)
    write_weights(path, weights, "bin" if (path / "pytorch_model.bin").exists() else "safetensors")
    return path


def random_matrix(generator: torch.Generator, rows: int, columns: int, gain: float = 1.0) -> Tensor:
    """Weights [rows, columns]. Products have the standard deviation of their inputs, times the gain."""
    return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5


def random_norm(generator: torch.Generator, size: int) -> Tensor:
    """Weights [size] of a norm, around 1."""
    return 1 + 0.3 * torch.randn(size, generator=generator)


def _eagle3_config(target: Any, options: Eagle3Options) -> dict[str, Any]:
    hidden = options.hidden_size or target.hidden_size
    theta, scaling = options.rope_theta, options.rope_scaling
    old = {"rope_theta": theta} | ({"rope_scaling": scaling} if scaling else {})
    new = {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | (scaling or {})}
    layer = {
        "model_type": options.kind if options.layout == "speculators" and options.kind == "qwen3" else "llama",
        **{"hidden_size": hidden, "intermediate_size": 2 * hidden, "num_hidden_layers": 1, "vocab_size": target.vocab_size},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "hidden_act": "silu"},
        **{"rms_norm_eps": 1e-5, "max_position_embeddings": 2048, "attention_bias": options.kind == "qwen2"},
        **(old if options.old_rope else new),
        "tie_word_embeddings": False,
    }
    names = ("fc_norm", "norm_before_fc", "norm_output", "norm_before_residual")
    flags: dict[str, Any] = {name: getattr(options, name) for name in names}
    if options.hidden_size and options.hidden_size != target.hidden_size:
        flags["target_hidden_size"] = target.hidden_size
    listed = {"eagle_aux_hidden_state_layer_ids": options.layer_ids} if options.layer_ids else {}
    if options.layout == "eagle":
        size = {} if options.draft_vocab is None else {"draft_vocab_size": options.draft_vocab}
        further = {"eagle_config": {**listed, "use_aux_hidden_state": True}} if listed else {}
        asked = {name: value for name, value in flags.items() if value}
        return {"architectures": [options.architecture], **layer, **size, **asked, **further, **options.further}
    return {
        **{"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "speculators_version": "0.9.0"},
        "speculators_config": {
            **{"algorithm": "eagle3", "default_proposal_method": "greedy"},
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": None, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": options.draft_vocab or target.vocab_size,
        **{"target_hidden_size": None, "embed_requires_grad": False, "tie_word_embeddings": False},
        **{**flags, **listed, **options.further},
    }


def _eagle3_weights(target: Any, options: Eagle3Options) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(options.seed)
    hidden, parts = options.hidden_size or target.hidden_size, len(options.layer_ids or range(3))
    heads, groups, size, inner = 4, 2, 12, 2 * hidden

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return random_matrix(generator, rows, columns, gain)

    def norm(size: int) -> Tensor:
        return random_norm(generator, size)

    weights = {
        "fc.weight": matrix(hidden, parts * target.hidden_size),
        "layers.0.self_attn.q_proj.weight": matrix(heads * size, 2 * hidden, 1.7),
        "layers.0.self_attn.k_proj.weight": matrix(groups * size, 2 * hidden, 1.7),
        "layers.0.self_attn.v_proj.weight": matrix(groups * size, 2 * hidden, 2.0),
        "layers.0.self_attn.o_proj.weight": matrix(hidden, heads * size),
        "layers.0.mlp.gate_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.up_proj.weight": matrix(inner, hidden),
        "layers.0.mlp.down_proj.weight": matrix(hidden, inner, 2.0),
        **{f"layers.0.{name}.weight": norm(hidden) for name in ("hidden_norm", "input_layernorm", "post_attention_layernorm")},
        "norm.weight": norm(hidden),
    }
    if options.kind == "qwen3":
        weights |= {f"layers.0.self_attn.{name}_norm.weight": norm(size) for name in "qk"}
    if options.kind == "qwen2":
        sizes = {"q": heads, "k": groups, "v": groups}
        weights |= {f"layers.0.self_attn.{name}_proj.bias": norm(size * n) - 1 for name, n in sizes.items()}
    if options.fc_norm:
        weights |= {f"fc_norm.{part}.weight": norm(target.hidden_size) for part in range(parts)}
    if options.norm_before_fc:
        weights["input_norm.weight"] = norm(parts * target.hidden_size)
    weights |= _vocabulary_weights(target, options, generator)
    return {name: weight.to(options.dtype) if weight.is_floating_point() else weight for name, weight in weights.items()}


def _vocabulary_weights(target: Any, options: Eagle3Options, generator: torch.Generator) -> dict[str, Tensor]:
    """The LM head, the embedding and the draft ids. The last token is no draft, so that ids off by one are still tokens."""
    hidden, drafted, weights = options.hidden_size or target.hidden_size, options.draft_vocab, dict[str, Tensor]()
    if options.lm_head:
        weights["lm_head.weight"] = random_matrix(generator, drafted or target.vocab_size, hidden, 3.0)
    if isinstance(options.embedding, Tensor):
        weights["embed_tokens.weight"] = options.embedding.detach()
    elif options.embedding == "own":
        weights["embed_tokens.weight"] = torch.randn(target.vocab_size, hidden, generator=generator)
    if drafted is not None:
        ids = torch.randperm(target.vocab_size - 1, generator=generator)[:drafted].sort().values
        weights["d2t"] = ids - torch.arange(drafted)
        weights["t2d"] = torch.isin(torch.arange(target.vocab_size), ids)
    return weights
