"""Writes the same function with other weights: a random orthogonal matrix rotates a decoder's residual stream.

    python recipes/rotated.py MODEL OUT [--seed 0] [--dtype float32]

The weights of recipes/smollm2/model.py are a dequantised Q4_1 file. They lie on the grid that quantize="int4" rounds to, so an
int4 copy is nearly the model itself. Its speed-up as a draft does not carry over to other models. The rotated weights lie on no
grid.

RMSNorm's weights move into the matrices that read after them. Every matrix that reads the residual stream is multiplied by an
orthogonal matrix Q, every matrix that writes to it by the transpose of Q (QuaRot, arXiv 2404.00456, section 4, computational
invariance). Logits stay the same up to rounding, after every layer. Exit heads that were trained on the original do not fit.
Rotation removes outliers. So rounding hurts a rotated model less than a model that was never quantised.

The layers must be those of Llama: two RMSNorms, attention with o_proj, an MLP with gate_proj, up_proj and down_proj. Prints the
largest difference of the logits. Writes nothing if it is more than rounding. --dtype: of the written file. bfloat16 rounds once
more.
"""

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import skipstone

MAX_DIFFERENCE = 1e-4
"""Relative to the largest logit. On SmolLM2 float32's rounding gives 2e-6, and a norm that stays behind over 1e-3."""
CHECKED_TOKENS = 64
LAYER = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
MATRICES = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


def expect_llama_layers(model: Any) -> None:
    """ValueError if the rotation would change the model's function."""
    kind = model.config.model_type
    layers = getattr(getattr(model, "model", None), "layers", ())
    if not layers or any({name for name, _ in layer.named_children()} != LAYER for layer in layers):
        raise ValueError(f"{kind}: its layers are not made of {', '.join(sorted(LAYER))}")
    for layer in layers:
        found = {
            name for part in (layer.self_attn, layer.mlp) for name, one in part.named_modules() if isinstance(one, nn.Linear)
        }
        if found != MATRICES:
            raise ValueError(f"{kind}: the matrices of a layer are {', '.join(sorted(found))} instead of those of Llama")
        if any(matrix.bias is not None for matrix in (layer.self_attn.o_proj, layer.mlp.down_proj)):
            raise ValueError(f"{kind}: biases of o_proj and down_proj are not supported")
    norms = [model.model.norm, *(norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm))]
    state = (
        torch.randn(model.config.hidden_size, generator=torch.Generator().manual_seed(0)) + 1
    )  # a mean that LayerNorm removes
    for norm in norms:
        if not torch.allclose(norm(state), norm.weight * state * state.square().mean().rsqrt(), rtol=1e-3, atol=1e-3):
            raise ValueError(f"{kind}: its norms do not compute weight * x / rms(x)")


@torch.no_grad()
def rotate(model: Any, seed: int = 0) -> None:
    """Rotate a model in place; its LM head becomes one of its own. ValueError for layers that are not Llama's.

    model: a float32 causal LM of transformers on the CPU.
    """
    expect_llama_layers(model)
    size = model.config.hidden_size
    noise = torch.randn(size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rotation = torch.linalg.qr(noise).Q  # [d, d], orthogonal

    def read(matrix: nn.Linear, norm: Any) -> None:
        set_weight(matrix, matrix.weight.double() * norm.weight.double() @ rotation)

    def write(matrix: nn.Linear) -> None:
        set_weight(matrix, rotation.T @ matrix.weight.double())

    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    model.config.tie_word_embeddings = False
    read(head, model.model.norm)
    set_weight(embedding, embedding.weight.double() @ rotation)
    for layer in model.model.layers:
        for matrix in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj):
            read(matrix, layer.input_layernorm)
        write(layer.self_attn.o_proj)
        for matrix in (layer.mlp.gate_proj, layer.mlp.up_proj):
            read(matrix, layer.post_attention_layernorm)
        write(layer.mlp.down_proj)
        layer.input_layernorm.weight.fill_(1)
        layer.post_attention_layernorm.weight.fill_(1)
    model.model.norm.weight.fill_(1)


def set_weight(module: Any, weight: Tensor) -> None:
    """A parameter of its own, also where another module shared the former one."""
    module.weight = nn.Parameter(weight.float(), requires_grad=module.weight.requires_grad)


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    """Logits [T, V] of random tokens."""
    generator = torch.Generator().manual_seed(0)
    return model(torch.randint(model.config.vocab_size, (1, CHECKED_TOKENS), generator=generator)).logits[0]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help='a folder, a GGUF file or a hub id; "nano" is the bundled model')
    parser.add_argument("out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    args = parser.parse_args()
    model, tokenizer = skipstone.load(None if args.model == "nano" else args.model, dtype=torch.float32, engine="eager")
    before = logits_of(model)
    try:
        rotate(model, args.seed)
    except ValueError as error:
        raise SystemExit(f"cannot rotate this model: {error}") from None
    difference, largest = float((logits_of(model) - before).abs().max()), float(before.abs().max())
    print(f"largest difference of the logits {difference:.2e}, largest logit {largest:.1f}")
    if not difference <= MAX_DIFFERENCE * largest:
        raise SystemExit("this is more than rounding: the rotated model is another function")
    model.to(getattr(torch, args.dtype)).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)


if __name__ == "__main__":
    main()
