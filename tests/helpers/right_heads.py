"""A target that is nearly a bigram model, and an EAGLE-3 head that drafts what it says."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.feature_heads import eagle3_folder, edit_weights

SIZE, GAIN = 24, 4.0
"""Size of the states, as large as all values of a head's two key-value heads; factor of queries and keys."""


@torch.no_grad()
def right_pair(path: Path, *, noise: float = 0.0, sharpness: float = 1.0, seed: int = 0, **options: Any) -> tuple[Any, Path]:
    """A target with 8 layers, and a head for it. noise: on the head's LM head, relative to its deviation. sharpness: of the
    target's logits. options: of `Eagle3Options`; not norm_output.

    Layers change the target's states little, so the next token follows from the newest one. Embeddings are signs. Every
    column of the head attends to itself, and replaces the state by the embedding: its value is [embedding - normed state],
    and the normed state is the residual. The target hardly says tokens that the head cannot draft.
    """
    generator = torch.Generator().manual_seed(seed)

    def noisy(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    sizes: dict[str, Any] = {"hidden_size": SIZE, "intermediate_size": 2 * SIZE, "num_hidden_layers": 8, "vocab_size": 97}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        target: Any = LlamaForCausalLM(config).eval().requires_grad_(False)
    for layer in target.model.layers:
        for part in (layer.self_attn.o_proj, layer.mlp.down_proj):
            part.weight.mul_(0.5)
    target.model.embed_tokens.weight.copy_(noisy(97, SIZE).sign())
    target.model.norm.weight.copy_(3 + noisy(SIZE))  # a normed state is three times as large as the state before
    target.lm_head.weight.copy_(sharpness * noisy(97, SIZE) / 3)
    folder = eagle3_folder(path, target.config, **options)

    def become_right(weights: dict[str, Tensor]) -> None:
        own = next(name.removesuffix("self_attn.q_proj.weight") for name in weights if name.endswith("q_proj.weight"))
        eye = torch.eye(SIZE)
        halves = eye.view(2, 12, SIZE)  # by key-value head
        mixed = torch.cat([halves[0].T, halves[0].T, halves[1].T, halves[1].T], 1) / 2  # of two heads each
        weights |= {
            "fc.weight": torch.zeros_like(weights["fc.weight"]),
            f"{own}self_attn.q_proj.weight": GAIN * _of_embeddings(halves.repeat_interleave(2, 0).flatten(0, 1)),
            f"{own}self_attn.k_proj.weight": GAIN * _of_embeddings(eye),
            f"{own}self_attn.v_proj.weight": torch.cat([eye, -eye], 1),
            f"{own}self_attn.o_proj.weight": mixed,
            f"{own}mlp.down_proj.weight": torch.zeros_like(weights[f"{own}mlp.down_proj.weight"]),
            **{f"{own}{norm}.weight": torch.ones(SIZE) for norm in ("input_layernorm", "hidden_norm")},
            "norm.weight": target.model.norm.weight.clone(),
        }
        ids = torch.arange(97)
        if "d2t" in weights:
            ids = weights["d2t"] + torch.arange(len(weights["d2t"]))
            target.lm_head.weight[~torch.isin(torch.arange(97), ids)] = 0
        rows = target.lm_head.weight[ids]
        weights["lm_head.weight"] = rows + noise * rows.std() * noisy(*rows.shape)

    return target, edit_weights(folder, become_right)


def _of_embeddings(weight: Tensor) -> Tensor:
    """The weight of [embedding, state] that reads the embedding only."""
    return torch.cat([weight, torch.zeros_like(weight)], 1)
