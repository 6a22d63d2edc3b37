"""Makes a model with the same texts and longer steps, because a method's speed-up depends on the time of a step.

    python recipes/measure/widened.py OUT --width 4096 [--model MODEL] [--dtype float32]

The feed-forward layers of a Llama-like model get --width inner units. New units have random weights in gate and up projections
and zeros in the down projection. So every step reads and multiplies them, and they add exactly nothing. Writes a checkpoint
with tokenizer and generation_config to OUT, and prints the bytes of all weights before and after.
"""

import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from skipstone.assets import NANO

SEED = 0
SPREAD = 0.02
"""Standard deviation of new weights, as in an untrained model."""


def linear(layer: nn.Module, name: str) -> nn.Linear:
    """A projection of a layer. TypeError if it is no linear layer."""
    found = layer.get_submodule(name)
    if not isinstance(found, nn.Linear):
        raise TypeError(f"{name} is a {type(found).__name__}")
    return found


def replace(projection: nn.Linear, weight: Tensor) -> None:
    """Replace the weights of a projection. weight: [outputs, inputs]."""
    projection.weight = nn.Parameter(weight.to(projection.weight.dtype), requires_grad=False)
    projection.out_features, projection.in_features = weight.shape


def widen(model: PreTrainedModel, width: int) -> None:
    """Give the feed-forward layers `width` inner units. ValueError if they have as many or have biases."""
    generator = torch.Generator().manual_seed(SEED)
    for layer in model.get_submodule("model.layers").children():
        gate, up, down = (linear(layer, f"mlp.{name}_proj") for name in ("gate", "up", "down"))
        hidden, inner = down.weight.shape
        if inner >= width or any(one.bias is not None for one in (gate, up, down)):
            raise ValueError(f"feed-forward layers of {inner} units, without biases, get more, not {width}")
        for one in (gate, up):
            new = torch.randn(width - inner, hidden, generator=generator) * SPREAD  # [width - inner, hidden]
            replace(one, torch.cat([one.weight.float(), new]))
        replace(down, torch.cat([down.weight, down.weight.new_zeros(hidden, width - inner)], 1))
    model.config.intermediate_size = width


def size(model: PreTrainedModel) -> float:
    """Millions of bytes of its weights."""
    return sum(one.numel() * one.element_size() for one in model.parameters()) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default=str(NANO))
    parser.add_argument("--width", type=int, required=True, help="inner units of a feed-forward layer")
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    config = AutoConfig.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, config=config, dtype=args.dtype)
    before = size(model)
    widen(model, args.width)
    model.generation_config = GenerationConfig.from_pretrained(args.model)
    model.save_pretrained(args.out)
    AutoTokenizer.from_pretrained(args.model).save_pretrained(args.out)
    print(f"{before:.0f} -> {size(model):.0f} MB of weights in {args.dtype}, {args.out}")


if __name__ == "__main__":
    main()
