"""Synthetic models: random weights of a wanted shape whose first E layers agree with the whole stack at a wanted rate.

They show how much of an expected speed-up the engine delivers on this machine, without a trained model. Nothing they give is a
result about a language model, and every output says so.

Construction: a Llama with weights of spread GAIN / sqrt(fan-in) (attention sharp enough that the next token depends on the
context, so greedy text does not fall into loops at once) and a head whose logits have a spread of SHARPNESS (some four nats of
entropy). The output projections of layers E and deeper are multiplied by one factor, found by bisection: at 0 those layers
are the identity and layers[:E] always agree with the model, at 1 hardly ever.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from skipstone import api
from skipstone.bench.dialogue import Conversation
from skipstone.bench.statistics import LOOPING, Estimate, bootstrap_rate, repeated_share

GAIN, SHARPNESS = 2.0, 3.0
HEAD_DIM = 64
BISECTIONS = 12
TOLERANCE = 0.003
FEW = 8  # contexts whose distributions are held at once
START = 4  # random tokens that a sampled context begins with
_LLAMA_3 = {"vocab_size": 128_256, "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "head_dim": 128}
_LLAMA_3 |= {"num_key_value_heads": 8, "max_position_embeddings": 8192}
NAMED: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": {
        **_LLAMA_3,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "llama-3.2-3b": {
        **_LLAMA_3,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        **_LLAMA_3,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "llama-2-7b": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "max_position_embeddings": 4096,
    },
    "llama-2-13b": {
        "vocab_size": 32_000,
        "hidden_size": 5120,
        "intermediate_size": 13824,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "max_position_embeddings": 4096,
    },
}


@dataclass(frozen=True)
class Shape:
    """A surrogate. name: as it was asked for. config: of a Llama. exit_layer: E. agreement: P(argmax of layers[:E] is the
    model's) per token, on contexts sampled at T = 1; None calibrates nothing, for plain decoding only."""

    name: str
    config: dict[str, Any]
    exit_layer: int | None = None
    agreement: float | None = None

    def __post_init__(self) -> None:
        depth = self.config["num_hidden_layers"]
        if (self.exit_layer is None) != (self.agreement is None):
            raise ValueError("--exit-layer and --agreement go together: which exit is to agree, and how often")
        if self.exit_layer is not None and not 1 <= self.exit_layer < depth:
            raise ValueError(f"--exit-layer must lie between 1 and {depth - 1} for {depth} layers, found {self.exit_layer}")
        if self.agreement is not None and not 0.0 < self.agreement < 1.0:
            raise ValueError(f"--agreement must lie between 0 and 1, found {self.agreement}")


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
            "shape": self.shape.name,
            "exit_layer": self.shape.exit_layer,
            "agreement": self.shape.agreement,
            "factor": self.factor,
            "realised_agreement": asdict(self.agreement),
            "overlap_at_temperature_1": asdict(self.overlap),
            "contexts": "sampled at T = 1 from the surrogate itself",
        }


def parse(text: str, exit_layer: int | None = None, agreement: float | None = None) -> Shape:
    """A name, a config.json of a Llama, or `layers=24,hidden=192[,vocab=4096]`. ValueError names the wrong or missing key."""
    if text in NAMED:
        return Shape(text, dict(NAMED[text]), exit_layer, agreement)
    if text.endswith(".json"):
        return Shape(text, _from_file(Path(text)), exit_layer, agreement)
    values = {"vocab": 4096}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or key.strip() not in ("layers", "hidden", "vocab"):
            raise ValueError(
                f"a surrogate is one of {', '.join(NAMED)}, a config.json, or layers=24,hidden=192[,vocab=4096]; found {text!r}"
            )
        if not value.strip().isdecimal() or int(value) < 1:
            raise ValueError(f"{key.strip()} must be a whole number of at least 1, found {value!r}")
        values[key.strip()] = int(value)
    if missing := [name for name in ("layers", "hidden") if name not in values]:
        raise ValueError(f"the surrogate lacks {missing[0]}, for example {missing[0]}=24")
    if values["hidden"] % HEAD_DIM:
        raise ValueError(f"hidden must be a multiple of {HEAD_DIM}, found {values['hidden']}")
    config = {
        "vocab_size": values["vocab"],
        "hidden_size": values["hidden"],
        "intermediate_size": round(8 / 3 * values["hidden"]),
        "num_hidden_layers": values["layers"],
        "num_attention_heads": values["hidden"] // HEAD_DIM,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
    }
    return Shape(text, config, exit_layer, agreement)


def _from_file(path: Path) -> dict[str, Any]:
    """What a Llama's config.json says of its shape."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    needed = ("num_hidden_layers", "hidden_size", "num_attention_heads")
    if missing := [key for key in needed if not isinstance(config, dict) or key not in config]:
        raise ValueError(f"{path}: the config of a Llama has {missing[0]}")
    if config.get("model_type") != "llama":
        raise ValueError(f"{path}: a surrogate is a Llama, found model_type {config.get('model_type')!r}")
    known, ours = LlamaConfig(), ("dtype", "torch_dtype", "model_type")  # ours: the surrogate's own say
    return {
        key: one for key, one in config.items() if hasattr(known, key) and key not in ours and not key.endswith("_token_id")
    }


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
    assert shape.exit_layer is not None
    assert shape.agreement is not None
    model: Any = build(shape, seed)
    model = model.to(dtype=dtype, device=device)
    full = [weight.detach().clone() for weight in _outputs(model, shape.exit_layer)]
    low, high, factor = 0.0, 1.0, 0.5
    for _ in range(BISECTIONS):
        factor = (low + high) / 2
        _scale(model, shape.exit_layer, full, factor)
        agree, _ = measure_agreement(model, shape.exit_layer, contexts(model, sequences, length, seed))
        if abs(agree.value - shape.agreement) < TOLERANCE:
            break
        low, high = (factor, high) if agree.value > shape.agreement else (low, factor)
    agreement, overlap = measure_agreement(model, shape.exit_layer, contexts(model, 2 * sequences, length, seed + 1_000_000))
    if not agreement.low - 0.05 <= shape.agreement <= agreement.high + 0.05:
        raise ValueError(
            f"an agreement of {shape.agreement} cannot be had with {shape.name} and exit {shape.exit_layer}: the nearest is "
            f"{agreement}"
        )
    return Calibrated(model, shape, factor, agreement, overlap)


def scaled(shape: Shape, seed: int, factor: float, dtype: torch.dtype, device: str | torch.device) -> LlamaForCausalLM:
    """A surrogate whose factor is known."""
    assert shape.exit_layer is not None
    model: Any = build(shape, seed).to(dtype=dtype, device=device)  # type: ignore[arg-type]
    _scale(model, shape.exit_layer, [weight.detach().clone() for weight in _outputs(model, shape.exit_layer)], factor)
    return model


def calibrated(about: dict[str, Any]) -> str:
    """One sentence about what was calibrated."""
    found = about["realised_agreement"]
    return (
        f"{about['shape']}: layers[:{about['exit_layer']}] agree with all at {found['value']:.3f} "
        f"({found['low']:.3f}-{found['high']:.3f}) on fresh contexts; {about['agreement']} was wanted"
    )


def build(shape: Shape, seed: int) -> LlamaForCausalLM:
    """A random Llama in float32 whose logits are those of a model that is neither sure nor clueless."""
    config = LlamaConfig(**shape.config, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
        for weight in (parameter for parameter in model.parameters() if parameter.ndim == 2):
            weight.normal_(0, GAIN / weight.shape[1] ** 0.5)
        width = config.hidden_size
        model.model.embed_tokens.weight.normal_(0, SHARPNESS / width**0.5 if config.tie_word_embeddings else 1)
        model.lm_head.weight.normal_(0, SHARPNESS / width**0.5)
    return model


def plain(shape: Shape, seed: int, dtype: torch.dtype, device: str | torch.device) -> LlamaForCausalLM:
    """Random weights of a shape as transformers draws them, in the dtype from the start. Its early exits mean nothing."""
    config = LlamaConfig(**shape.config, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype=dtype)
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
    """(agreement, overlap) of layers[:E] with the whole model on sampled contexts [S, T], teacher-forced, over the tokens that
    follow the random start; bootstrap over contexts."""
    same, overlap, count = [], [], float(ids.shape[1] - START)
    for part in ids.split(FEW):  # distributions are large
        output = model(part, output_hidden_states=True, use_cache=False)
        early = model.lm_head(model.model.norm(output.hidden_states[exit_layer][:, START:])).float()
        late = output.logits[:, START:].float()
        same += (early.argmax(-1) == late.argmax(-1)).double().sum(1).tolist()
        overlap += torch.minimum(early.softmax(-1), late.softmax(-1)).sum(-1).double().sum(1).tolist()
    return bootstrap_rate(same, [count] * len(same)), bootstrap_rate(overlap, [count] * len(same))


def sampled_prompts(model: Any, count: int, length: int, seed: int) -> list[Conversation]:
    """`count` contexts of `length` tokens. ValueError where even sampled text loops: nothing measured on it means anything."""
    rows = contexts(model, count, length, seed).cpu()
    shares = [repeated_share(row[:START].tolist(), row[START:].tolist()) for row in rows]
    if (mean := sum(shares) / len(shares)) >= LOOPING:
        raise ValueError(f"the surrogate's sampled text loops (share of repeated 8-grams {mean:.2f}); use a larger vocab")
    return [Conversation(f"sampled at T = 1, number {index}", ids=row.clone()) for index, row in enumerate(rows)]


def random_prompts(vocab: int, count: int, length: int, seed: int) -> list[Conversation]:
    """`count` prompts of uniformly random ids."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(vocab, (count, length), generator=generator)
    return [Conversation(f"random ids, number {index}", ids=row.clone()) for index, row in enumerate(rows)]
