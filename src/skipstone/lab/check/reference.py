"""What the native engine should compute if it rounds inputs of products: transformers' modules in float64, which do the same.

Inputs of products with GGUF's blocks are rounded to 8 bits, those of products with bfloat16 weights to bfloat16. A difference
in the last place of float32 moves an input to the next rounded number now and then, and the following layers multiply that. So
whole texts are compared up to the difference between the references in float32 and in float64. Single layers, which get the
engine's own inputs, are equal for most tokens up to float32's rounding.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.weights import BLOCKS
from skipstone.models import torch_defaults
from skipstone.models.gguf.weights import blocks_of
from skipstone.models.mapped_model import MappedModel
from skipstone.models.unpacked_gguf import unpacked_model
from skipstone.models.weight_files import DTYPES
from skipstone.utils.cached_property import cached_property
from skipstone.utils.limits import available_memory_bytes

Rounding = Callable[[Tensor], Tensor]
GROUP = 32  # inputs that share a scale
LEVELS = 127  # largest number of 8 bits
ROWS, ROW_TOKENS = 32, 8  # of the text for single layers: a moved input changes all later tokens of its row
NOISE = 1e-3  # share of the embeddings: products of an embedding's codes often lie halfway between two 8-bit numbers
EXACT = 1e-5  # largest difference of half of the tokens, as a share of a layer's change of a token
MOVED = 0.1  # largest difference of any token


@dataclass(frozen=True)
class LayerDifference:
    """Differences of the tokens after one layer, as shares of its change of a token."""

    name: str
    median: float
    largest: float

    def __str__(self) -> str:
        return f"{self.name} differs by {self.median:.2g} in the middle and {self.largest:.2g} at most"

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains them."""
        return self.median <= EXACT and self.largest <= MOVED


class Reference:
    """The reference of a native engine's model, a mapped GGUF file's or one of transformers. rounds_inputs: as in `Engine`.
    ValueError if memory is too small for it."""

    def __init__(self, model: Any, rounds_inputs: bool) -> None:
        self._model, self._rounds_inputs = model, rounds_inputs
        needed = sum(one.numel() for one in model.parameters()) * torch.float64.itemsize
        if (available := available_memory_bytes()) < needed:
            sizes = f"needs {needed / 1e9:.1f} GB of memory, and {available / 1e9:.1f} GB are free"
            raise ValueError(f"the reference of {model.config.name_or_path} {sizes}: end other programs")

    @cached_property
    def precise(self) -> Any:
        """In float64."""
        return self.copy_in(torch.float64)

    def copy_in(self, dtype: torch.dtype) -> Any:
        """A copy of the model in this dtype."""
        if isinstance(self._model, MappedModel):
            with torch_defaults.loading():
                made: Any = unpacked_model(self._model, dtype, attn_implementation="eager").eval()
        else:
            made = copy.deepcopy(self._model).to(dtype)
        for name, module in made.named_modules():
            rounding = self._rounding_of(self._model.get_submodule(name)) if isinstance(module, nn.Linear) else None
            if rounding is not None:
                module.register_forward_pre_hook(partial(_round_input, rounding))
        return made

    def _rounding_of(self, linear: Any) -> Rounding | None:
        """How inputs of a linear module are rounded; None if they are not."""
        weight: Tensor = linear.weight
        blocks = blocks_of(weight)
        if blocks is not None and blocks.kind in BLOCKS:
            return round_to_codes
        stored = weight.dtype if blocks is None else DTYPES.get(blocks.kind)
        return round_to_bfloat16 if self._rounds_inputs and stored == torch.bfloat16 else None

    @torch.inference_mode()
    def layers(self, runner: ModelRunner, text: Tensor) -> list[LayerDifference]:
        """Compare the embedding, every layer and the logits. Each reference layer gets what the engine gave to its own.

        text: [T] int64."""
        count = max(1, min(ROWS, len(text) // ROW_TOKENS))
        ids = text[: count * ROW_TOKENS].view(count, -1)
        (embedded,) = runner.read_layers(ids, [])
        noise = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
        each_layer = [range(index, index + 1) for index in range(runner.depth)]
        states = [one.double() for one in runner.run_layers(embedded * (1 + NOISE * noise), each_layer)]
        expected: list[Tensor] = []

        def exchange(own: Tensor, _: Any, given: tuple[Tensor, ...], returned: Tensor | None = None) -> Any:
            expected.append(given[0] if returned is None else returned)
            return (own, *given[1:]) if returned is None else own

        first, *_ = layers = self.precise.get_decoder().layers
        hooks = [first.register_forward_pre_hook(partial(exchange, states[0]))]
        hooks += [layer.register_forward_hook(partial(exchange, own)) for layer, own in zip(layers, states[1:], strict=True)]
        try:
            logits = self.precise(ids).logits
        finally:
            for hook in hooks:
                hook.remove()
        found = [
            _difference("the embedding", embedded, expected[0], expected[0]),
            _difference("the logits", runner.logits(states[-1].float()), logits, logits),
        ]
        for index, (given, own, right) in enumerate(zip(states[:-1], states[1:], expected[1:], strict=True)):
            found.append(_difference(f"layer {index}", own, right, right - given))
        return found

    @torch.inference_mode()
    def scores(self, model: Any, prompt: Tensor, text: list[int]) -> Tensor:
        """[n, V] float64: scores of the tokens of a text after its prompt [T], each after the engine's own text before it.

        model: `precise`, or a copy in float32."""
        ids = torch.cat([prompt, torch.tensor(text[:-1], dtype=prompt.dtype, device="cpu")])[None]
        return model(ids, logits_to_keep=len(text)).logits[0].double()


def _round_input(rounding: Rounding, _: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
    return rounding(given[0])


def round_to_bfloat16(values: Tensor) -> Tensor:
    """The nearest bfloat16 numbers in the dtype of the values."""
    return values.bfloat16().to(values.dtype)


def round_to_codes(values: Tensor) -> Tensor:
    """Round [..., d] to 8 bits by groups of 32."""
    groups = values.unflatten(-1, (-1, GROUP))
    step = (groups.abs().amax(-1, keepdim=True) / LEVELS).clamp(min=1e-30)
    return ((groups / step).round() * step).flatten(-2)


def _difference(name: str, found: Tensor, expected: Tensor, change: Tensor) -> LayerDifference:
    shares = ((found - expected).norm(dim=-1) / change.norm(dim=-1).clamp(min=1e-30)).nan_to_num(torch.inf)
    return LayerDifference(name, float(shares.median()), float(shares.max()))
