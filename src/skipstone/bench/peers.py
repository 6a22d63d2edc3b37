"""What people use today: transformers' own decoding, as rows of the benchmark.

Traps (see the tests): `num_assistant_tokens` and `assistant_confidence_threshold` given to `generate` are ignored, they are
read from the model's generation config; early exit leaves `config.num_hidden_layers` cut after an exception; families that do
not slice their layers by that field cannot do it at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.bench.measure import Emitted
from skipstone.core.model import LayeredModel


@dataclass(frozen=True)
class HFGenerate:
    """`model.generate` with its dynamic cache."""

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> Emitted:
        return _generate(model, prompt, options)


@dataclass(frozen=True)
class HFEarlyExit:
    """`assistant_early_exit`: transformers' self-speculative decoding (its blog post "layerskip", 2024).

    exit_layer: E. num_assistant_tokens: drafts a step, constant schedule. confidence_threshold: drafting stops after a token
    whose probability is below it, 0 never stops.
    """

    exit_layer: int
    num_assistant_tokens: int = 20
    confidence_threshold: float = 0.4

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> Emitted:
        with restored_depth(model), self._drafting(model):
            return _generate(model, prompt, {**options, "assistant_early_exit": self.exit_layer})

    @contextmanager
    def _drafting(self, model: PreTrainedModel) -> Iterator[None]:
        config: Any = model.generation_config
        wanted = {
            "num_assistant_tokens": self.num_assistant_tokens,
            "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": self.confidence_threshold,
        }
        before = {name: getattr(config, name) for name in wanted}
        try:
            for name, value in wanted.items():
                setattr(config, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(config, name, value)


@dataclass(frozen=True)
class HFPromptLookup:
    """`prompt_lookup_num_tokens`: drafts are what followed the last n-gram earlier in the text (Saxena, 2023)."""

    prompt_lookup_num_tokens: int = 10

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> Emitted:
        return _generate(model, prompt, {**options, "prompt_lookup_num_tokens": self.prompt_lookup_num_tokens})


def _generate(model: PreTrainedModel, prompt: Tensor, options: dict[str, Any]) -> Emitted:
    kind: Any = type(model)  # the class's own generate: `skipstone.enable` may have put another on the instance
    sequences = kind.generate(model, prompt, **options)
    return Emitted(sequences[0, prompt.shape[1] :].tolist())


@contextmanager
def restored_depth(model: PreTrainedModel) -> Iterator[None]:
    """Put `num_hidden_layers` back, whatever happens inside."""
    base: Any = getattr(model, model.base_model_prefix)
    depth = base.config.num_hidden_layers
    try:
        yield
    finally:
        base.config.num_hidden_layers = depth


@torch.inference_mode()
def early_exit_refusal(model: PreTrainedModel) -> str | None:
    """Why transformers cannot exit early from this model, or None where it can.

    It sets `config.num_hidden_layers`; whether that cuts the stack is tried out with a forward over one token.
    """
    layers = LayeredModel(model).layers
    base: Any = getattr(model, model.base_model_prefix)
    wanted, ran = len(layers) - 1, []
    if not wanted:
        return "the model has one layer"
    with ExitStack() as stack:
        stack.enter_context(restored_depth(model))
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(lambda *_: ran.append(1)).remove)
        base.config.num_hidden_layers = wanted
        try:
            model(torch.zeros((1, 1), dtype=torch.long, device=model.device), use_cache=True)
        except (IndexError, AttributeError, RuntimeError, ValueError) as error:
            found = f"its forward fails with {type(error).__name__}: {error}"
        else:
            found = f"{len(ran)} of {wanted + 1} layers ran"
    if found.startswith(f"{wanted} of"):
        return None
    return f"transformers exits early by setting config.num_hidden_layers; with {wanted} on {type(model).__name__} {found}"
