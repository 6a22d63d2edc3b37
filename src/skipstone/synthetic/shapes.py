"""Shapes of synthetic models, and which part of one is to agree with the whole."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from skipstone.methods.shared.layer_sets import Space
from skipstone.models.passes import SkipSet

HEAD_DIM = 64  # of shapes given by layers and hidden size
SHAPE_KEYS = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LLAMA_3 = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}
_LLAMA_2 = {"max_position_embeddings": 4096}


def _llama(*shape: int, **more: Any) -> dict[str, Any]:
    """A Llama's config. shape: the values of SHAPE_KEYS."""
    return {**dict(zip(SHAPE_KEYS, shape, strict=True)), **more}


NAMED: dict[str, dict[str, Any]] = {
    "llama-3.2-1b": _llama(128_256, 2048, 8192, 16, 32, **_LLAMA_3 | {"head_dim": 64, "tie_word_embeddings": True}),
    "llama-3.2-3b": _llama(128_256, 3072, 8192, 28, 24, **_LLAMA_3, tie_word_embeddings=True),
    "llama-3-8b": _llama(128_256, 4096, 14_336, 32, 32, **_LLAMA_3),
    "llama-2-7b": _llama(32_000, 4096, 11_008, 32, 32, **_LLAMA_2),
    "llama-2-13b": _llama(32_000, 5120, 13_824, 40, 40, **_LLAMA_2),
}
"""Shapes of real models."""


@dataclass(frozen=True)
class Shape:
    """A surrogate."""

    name: str  # as it was asked for
    config: dict[str, Any]  # of a Llama
    exit_layer: int | None = None  # E, of the part that is to agree
    agreement: float | None = None
    """P(argmax of that part is the model's) per token, on contexts sampled at T = 1; None calibrates nothing, for plain
    decoding only."""
    skip_ratio: float | None = None  # of a uniform layer set, instead of an exit layer
    sure: float = 0.0  # share of the tokens whose successor is nearly certain, as in most of a real text

    def __post_init__(self) -> None:
        depth = self.config["num_hidden_layers"]
        if self.exit_layer is not None and self.skip_ratio is not None:
            raise ValueError("give either --exit-layer or --skip-ratio")
        if (self.exit_layer is None and self.skip_ratio is None) != (self.agreement is None):
            raise ValueError("--agreement goes with --exit-layer or --skip-ratio: what is to agree, and how often")
        if self.exit_layer is not None and not 1 <= self.exit_layer < depth:
            raise ValueError(f"--exit-layer must lie between 1 and {depth - 1} for {depth} layers, found {self.exit_layer}")
        if self.skip_ratio is not None and not 0 < Space(depth).count(self.skip_ratio) < Space(depth).size:
            raise ValueError(f"--skip-ratio must leave out some of the sublayers and not all, found {self.skip_ratio}")
        if self.agreement is not None and not 0.0 < self.agreement < 1.0:
            raise ValueError(f"--agreement must lie between 0 and 1, found {self.agreement}")
        if not 0.0 <= self.sure < 1.0:
            raise ValueError(f"--sure must lie in [0, 1), found {self.sure}")
        if self.sure and self.agreement is None:
            raise ValueError("--sure goes with --agreement: without one nothing is sampled from the surrogate")

    @property
    def rest(self) -> SkipSet:
        """The sublayers that are no part of what is to agree."""
        depth = self.config["num_hidden_layers"]
        if self.exit_layer is not None:
            deeper = frozenset(range(self.exit_layer, depth))
            return SkipSet(deeper, deeper)
        assert self.skip_ratio is not None
        space = Space(depth)
        return space.to_skip_set(space.uniform(space.count(self.skip_ratio)))

    @property
    def part(self) -> str:
        """What is to agree, in words."""
        return f"layers[:{self.exit_layer}]" if self.exit_layer is not None else f"all but a share of {self.skip_ratio}"

    @property
    def method(self) -> dict[str, Any]:
        """The method that drafts with that part."""
        if self.exit_layer is not None:
            return {"method": "layerskip", "exit_layer": self.exit_layer}
        return {"method": "swift", "skip_ratio": self.skip_ratio}


def parse(
    text: str, exit_layer: int | None = None, agreement: float | None = None, skip_ratio: float | None = None, sure: float = 0.0
) -> Shape:
    """A name, with `,layers=16` for fewer layers of it; a config.json of a Llama; or `layers=24,hidden=192[,vocab=4096]`.
    ValueError names the wrong or missing key."""
    asked = (exit_layer, agreement, skip_ratio, sure)
    named, comma, layers = text.partition(",layers=")
    if named in NAMED and (not comma or (layers.isdecimal() and int(layers) > 0)):
        return Shape(text, NAMED[named] | ({"num_hidden_layers": int(layers)} if comma else {}), *asked)
    if text.endswith(".json"):
        return Shape(text, _from_file(Path(text)), *asked)
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
    layers, hidden, vocab = values["layers"], values["hidden"], values["vocab"]
    more = {"num_key_value_heads": 1, "head_dim": HEAD_DIM, "max_position_embeddings": 2048}
    config = _llama(vocab, hidden, round(8 / 3 * hidden), layers, hidden // HEAD_DIM, **more)
    return Shape(text, config, *asked)


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
