"""Synthetic models: random weights of a wanted shape whose first E layers agree with the whole stack at a wanted rate.

They show how much of an expected speed-up the engine delivers on this machine, without a trained model. Nothing they give is a
result about a language model, and every output says so.

Construction: a Llama with weights of spread GAIN / sqrt(fan-in) (attention sharp enough that the next token depends on the
context, so greedy text does not fall into loops at once) and a head whose logits have a spread of SHARPNESS (some four nats of
entropy). The output projections of layers E and deeper are multiplied by one factor, found by bisection: at 0 those layers
are the identity and layers[:E] always agree with the model, at 1 hardly ever.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from skipstone import api
from skipstone.bench.prompts import Prompt
from skipstone.bench.statistics import LOOPING, Estimate, bootstrap_rate, repeated_share

GAIN, SHARPNESS = 2.0, 3.0
HEAD_DIM = 64
NAMED = "llama-1b"
BISECTIONS = 12
TOLERANCE = 0.003
START = 4  # random tokens that a sampled context begins with


@dataclass(frozen=True)
class Shape:
    """A surrogate. exit: E. agreement: P(argmax of layers[:E] is the model's) per token, on contexts sampled at T = 1."""

    layers: int
    hidden: int
    exit: int
    agreement: float
    vocab: int = 4096

    def __post_init__(self) -> None:
        if not 1 <= self.exit < self.layers:
            raise ValueError(f"exit must lie between 1 and {self.layers - 1} for {self.layers} layers, found {self.exit}")
        if not 0.0 < self.agreement < 1.0:
            raise ValueError(f"agreement must lie between 0 and 1, found {self.agreement}")
        if self.hidden < HEAD_DIM or self.hidden % HEAD_DIM:
            raise ValueError(f"hidden must be a multiple of {HEAD_DIM}, found {self.hidden}")
        if self.vocab < 2:
            raise ValueError(f"vocab must be at least 2, found {self.vocab}")


@dataclass(frozen=True)
class Calibrated:
    """A surrogate, what it measures like, and prompts for it.

    agreement: realised, on contexts that the calibration did not see, interval over contexts. overlap: mean of sum(min(p, q))
    there, the acceptance that sampling at T = 1 would have.
    """

    model: LlamaForCausalLM
    shape: Shape
    factor: float
    agreement: Estimate
    overlap: Estimate

    def report(self) -> dict[str, Any]:
        """The figures as plain JSON values."""
        return {
            "synthetic": True,
            **asdict(self.shape),
            "factor": self.factor,
            "realised_agreement": asdict(self.agreement),
            "overlap_at_temperature_1": asdict(self.overlap),
            "contexts": "sampled at T = 1 from the surrogate itself",
        }


def parse(text: str) -> Shape:
    """`layers=24,hidden=192,exit=6,agreement=.85` as a Shape. ValueError names the wrong or missing key."""
    kinds = {field.name: float if field.name == "agreement" else int for field in fields(Shape)}
    values: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key.strip() not in kinds:
            raise ValueError(f"a surrogate is {NAMED} or key=value pairs of {', '.join(kinds)}; found {part!r}")
        try:
            values[key.strip()] = kinds[key.strip()](value)
        except ValueError as error:
            raise ValueError(f"{key.strip()} must be a number, found {value!r}") from error
    if missing := [name for name in ("layers", "hidden", "exit", "agreement") if name not in values]:
        raise ValueError(f"the surrogate lacks {', '.join(missing)}, for example {missing[0]}=...")
    return Shape(**values)


def calibrate(
    shape: Shape,
    seed: int,
    *,
    sequences: int = 128,
    length: int = 96,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
) -> Calibrated:
    """Build a surrogate and scale its later layers until E agrees with the whole at the wanted rate.

    sequences, length: contexts of each measurement; the one reported uses twice as many, from other seeds. ValueError
    where the wanted agreement cannot be had.
    """
    model: Any = build(shape, seed)
    model = model.to(dtype=dtype, device=device)
    full = [weight.detach().clone() for weight in _outputs(model, shape.exit)]
    low, high, factor = 0.0, 1.0, 0.5
    for _ in range(BISECTIONS):
        factor = (low + high) / 2
        _scale(model, shape.exit, full, factor)
        agree, _ = measure_agreement(model, shape.exit, contexts(model, sequences, length, seed))
        if abs(agree.value - shape.agreement) < TOLERANCE:
            break
        low, high = (factor, high) if agree.value > shape.agreement else (low, factor)
    agreement, overlap = measure_agreement(model, shape.exit, contexts(model, 2 * sequences, length, seed + 1_000_000))
    if not agreement.low - 0.05 <= shape.agreement <= agreement.high + 0.05:
        raise ValueError(
            f"an agreement of {shape.agreement} cannot be had with {shape.layers} layers of {shape.hidden}, "
            f"exit {shape.exit}: the nearest is {agreement}"
        )
    return Calibrated(model, shape, factor, agreement, overlap)


def build(shape: Shape, seed: int) -> LlamaForCausalLM:
    """A random Llama in float32, untied, one key/value head."""
    heads = shape.hidden // HEAD_DIM
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=round(8 / 3 * shape.hidden),
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        for weight in (parameter for parameter in model.parameters() if parameter.ndim == 2):
            weight.normal_(0, GAIN / weight.shape[1] ** 0.5)
        model.model.embed_tokens.weight.normal_(0, 1)
        model.lm_head.weight.normal_(0, SHARPNESS / shape.hidden**0.5)
    return model


def llama_1b(seed: int, dtype: torch.dtype, device: str | torch.device) -> LlamaForCausalLM:
    """Random weights in the shape of Llama 3.2 1B. Its early exits are not calibrated: for plain decoding only."""
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        dtype=dtype,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = LlamaForCausalLM._from_config(config, dtype=dtype)
    return model.to(device).eval()


def _outputs(model: Any, exit_layer: int) -> list[Tensor]:
    """The projections through which layers E and deeper write to the residual stream."""
    layers = model.model.layers[exit_layer:]
    return [weight for layer in layers for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight)]


@torch.no_grad()
def _scale(model: Any, exit_layer: int, full: list[Tensor], factor: float) -> None:
    for weight, original in zip(_outputs(model, exit_layer), full, strict=True):
        weight.copy_(original * factor)


def contexts(model: Any, sequences: int, length: int, seed: int) -> Tensor:
    """[sequences, length] int64 ids, sampled from the model itself at T = 1 after a few random tokens. Reproducible."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(model.config.vocab_size, (sequences, START), generator=generator).to(model.device)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "eos_token_id": None, "pad_token_id": 0}
    return api.generate(model, start, "autoregressive", seed=seed, max_new_tokens=length - START, **options).sequences


@torch.inference_mode()
def measure_agreement(model: Any, exit_layer: int, ids: Tensor) -> tuple[Estimate, Estimate]:
    """(agreement, overlap) of layers[:E] with the whole model on contexts [S, T], teacher-forced, bootstrap over contexts."""
    output = model(ids[:, START:], output_hidden_states=True, use_cache=False)
    early = model.lm_head(model.model.norm(output.hidden_states[exit_layer])).float()
    late = output.logits.float()
    same = (early.argmax(-1) == late.argmax(-1)).double().sum(1).tolist()
    overlap = torch.minimum(early.softmax(-1), late.softmax(-1)).sum(-1).double().sum(1).tolist()
    count = [float(late.shape[1])] * late.shape[0]
    return bootstrap_rate(same, count), bootstrap_rate(overlap, count)


def sampled_prompts(model: Any, count: int, length: int, seed: int) -> list[Prompt]:
    """`count` contexts of `length` tokens. ValueError where even sampled text loops: nothing measured on it means anything."""
    rows = contexts(model, count, length, seed).cpu()
    shares = [repeated_share(row[:START].tolist(), row[START:].tolist()) for row in rows]
    if sum(shares) / len(shares) >= LOOPING:
        raise ValueError(
            f"the surrogate's sampled text loops (share of repeated 8-grams {max(shares):.2f}); use a larger vocab"
        )
    return [Prompt(f"sampled at T = 1, number {index}", row.clone()) for index, row in enumerate(rows)]


def random_prompts(vocab: int, count: int, length: int, seed: int) -> list[Prompt]:
    """`count` prompts of uniformly random ids."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocab, (count, length), generator=generator)
    return [Prompt(f"random ids, number {index}", row.clone()) for index, row in enumerate(rows)]
