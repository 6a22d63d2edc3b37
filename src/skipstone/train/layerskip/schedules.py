"""LayerSkip's training recipe (Elhoushi et al., ACL 2024, arXiv 2404.16710, section 4.1) as functions of layer and step.

Layers l and steps t count from 0, L is the number of layers, T the number of steps; exit l predicts from x_{l+1}, so it is the
exit that decoding calls E = l + 1.
"""

import itertools
import math
import warnings
from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as pydantic_dataclass


def dropout_by_layer(layer: int, layers: int) -> float:
    """D(l), eq. 3: from 0 at the first layer to 1 at the last, exponentially. ValueError for L < 2."""
    return _exponential(layer, layers, "layers")


def dropout_by_step(step: int, steps: int) -> float:
    """S_exp(t), eq. 4: from 0 at the first step to 1 at the last, exponentially. ValueError for T < 2."""
    return _exponential(step, steps, "steps")


def _exponential(index: int, count: int, what: str) -> float:
    if count < 2:
        raise ValueError(f"exponential layer dropout needs at least 2 {what}, found {count}: it divides by one less")
    return math.exp(index * math.log(2) / (count - 1)) - 1


def exit_scale(layer: int, layers: int, e_scale: float) -> float:
    """e(l), the equation after eq. 6: later exits weigh quadratically more, the last layer most. e(0) = 0."""
    if layer < layers - 1:
        return e_scale * sum(range(layer + 1))
    return layers - 1 + e_scale * sum(range(layers - 1))


def rotational(step: int, layers: int, dilation: int) -> list[bool]:
    """C_rot,R(t, l): every R-th layer, one layer further each step."""
    return [(layer - step) % dilation == 0 for layer in range(layers)]


def gradual(step: int, layers: int, steps: int) -> list[bool]:
    """C_grad(t, l): from the last layer down to the first, one more every T / 2L steps."""
    enabled = 1 + step * 2 * layers // steps
    return [layer >= layers - enabled for layer in range(layers)]


def normalised(active: Sequence[bool], scales: Sequence[float]) -> list[float]:
    """e~(t, l), eq. 6. ValueError where the active layers weigh nothing: e(0) = 0, so {0} alone is no objective."""
    kept = [scale * on for on, scale in zip(active, scales, strict=True)]
    if (total := sum(kept)) <= 0:
        layers = [layer for layer, on in enumerate(active, 1) if on]
        raise ValueError(f"the active exits E = {layers} have no weight, as e(0) = 0: set keep_last, or raise e_scale")
    return [scale / total for scale in kept]


_CHECKED = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


@pydantic_dataclass(frozen=True, config=_CHECKED)
class LayerDropout:
    """p_max: rate of the last layer once the curriculum is over. curriculum: "exponential" over the run (training from
    scratch) or "none" (continual training and fine-tuning). by_layer: "exponential", eq. 3's growth from 0 to p_max, or
    "constant", p_max for every layer, the paper's alternative (appendix A.3, figure 12). If all rows drop the first layer, a
    constant rate keeps one of them."""

    p_max: Annotated[float, Field(ge=0, le=1)] = 0.1
    curriculum: Literal["exponential", "none"] = "none"
    by_layer: Literal["exponential", "constant"] = "exponential"

    def rates(self, step: int, layers: int, steps: int) -> list[float]:
        """p_{l,t} = S(t) D(l) p_max, eq. 2, for every layer."""
        by_step = dropout_by_step(step, steps) if self.curriculum == "exponential" else 1.0
        depths = [1.0 if self.by_layer == "constant" else dropout_by_layer(layer, layers) for layer in range(layers)]
        return [by_step * by_depth * self.p_max for by_depth in depths]


@pydantic_dataclass(frozen=True, config=_CHECKED)
class EarlyExitLoss:
    """The early-exit loss.

    curriculum: which exits a step trains; dilation: R of the rotational one, None for L - 1. keep_last: every step trains the
    last layer (ours: the paper's text does not say it). e_scale: eq. 6's.
    kl_weight: ours, None for the paper's cross-entropy. A number trains the active exits towards the last layer's own
    distribution instead: cross-entropy of the last layer + kl_weight x mean KL(last || exit), without e_scale.
    exit_layers: ours, the exits E that the curriculum ranges over, counted from 1 as decoding counts them, None for all: L and
    R then count *these*. exits: an older spelling, which numbers layers from 0.
    """

    e_scale: Annotated[float, Field(ge=0, le=1)] = 0.2
    curriculum: Literal["rotational", "gradual", "none"] = "rotational"
    dilation: Annotated[int, Field(ge=1)] | None = 8
    keep_last: bool = True
    kl_weight: Annotated[float, Field(gt=0)] | None = None
    exits: InitVar[tuple[int, ...] | None] = None
    exit_layers: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)] | None = None

    def __post_init__(self, exits: tuple[int, ...] | None) -> None:
        if exits is not None:
            object.__setattr__(self, "exit_layers", renamed_exits(exits, self.exit_layers))

    def check(self, layers: int, steps: int) -> None:
        """ValueError where some step of a run would have no objective, or where no step trains an exit that was asked for."""
        if self.kl_weight is not None and not self.keep_last:
            raise ValueError("kl_weight trains exits towards the last layer, which must be trained too: keep_last=True")
        among = self._among(layers)
        if self.curriculum == "rotational" and self.dilation is not None and self.dilation > len(among):
            counted = f"{len(among)} {'layers' if self.exit_layers is None else 'exits'}"
            raise ValueError(f"dilation (R) must be at most the {counted}, found {self.dilation}: most steps train no exit")
        if self.exit_layers is not None and not self.trained(layers):
            raise ValueError(f"exit_layers {self.exit_layers} of {layers} layers train nothing but the last layer, as e(0) = 0")
        if self.kl_weight is None:
            for step in range(min(steps, layers)):  # a rotation is over after R <= L steps
                self.weights(step, layers, steps)

    def trained(self, layers: int) -> list[int]:
        """The exits E below the last layer that some step trains, counted from 1."""
        below = [layer for layer in self._among(layers) if layer < layers - 1]
        return [layer + 1 for layer in below if self.kl_weight or exit_scale(layer, layers, self.e_scale)]

    def active(self, step: int, layers: int, steps: int) -> list[bool]:
        """C(t, l) for every layer."""
        among = self._among(layers)
        chosen = [True] * len(among)
        if self.curriculum == "rotational":
            chosen = rotational(step, len(among), self.dilation or max(1, len(among) - 1))
        elif self.curriculum == "gradual":
            chosen = gradual(step, len(among), steps)
        active = set(itertools.compress(among, chosen))
        return [layer in active or (self.keep_last and layer == layers - 1) for layer in range(layers)]

    def weights(self, step: int, layers: int, steps: int) -> list[float]:
        """e~(t, l) of every layer's cross-entropy."""
        scales = [exit_scale(layer, layers, self.e_scale) for layer in range(layers)]
        return normalised(self.active(step, layers, steps), scales)

    def _among(self, layers: int) -> list[int]:
        """Layers that the curriculum ranges over, counted from 0."""
        if self.exit_layers is None:
            return list(range(layers))
        if wrong := [layer for layer in self.exit_layers if layer > layers]:
            raise ValueError(f"exit_layers must lie between 1 and {layers}, found {wrong}")
        return sorted({layer - 1 for layer in self.exit_layers})


def renamed_exits(exits: Sequence[int], exit_layers: Any = None) -> tuple[int, ...]:
    """`exit_layers` for layers that the older setting `exits` counts from 0, with a warning. ValueError for both."""
    if exit_layers is not None:
        raise ValueError(f"give exit_layers, from 1, or exits, from 0, found both: {exit_layers!r} and {exits!r}")
    if not all(type(layer) is int and layer >= 0 for layer in exits):
        raise ValueError(f"exits must be layers counted from 0, or None for all, found {exits!r}")
    renamed = tuple(layer + 1 for layer in exits)
    warnings.warn(f"exits counts layers from 0: write exit_layers: {list(renamed)}", FutureWarning, stacklevel=2)
    return renamed


@dataclass(frozen=True)
class LayerSkipRecipe:
    """Layer dropout and early-exit loss together."""

    dropout: LayerDropout = field(default_factory=LayerDropout)
    exits: EarlyExitLoss = field(default_factory=EarlyExitLoss)

    def check(self, layers: int, steps: int) -> None:
        """ValueError for a model or a run that the recipe's formulas do not cover."""
        if steps < 1:
            raise ValueError(f"a run needs at least 1 step, found {steps}")
        self.dropout.rates(0, layers, steps)
        self.exits.check(layers, steps)


@dataclass(frozen=True, kw_only=True)
class Preset(LayerSkipRecipe):
    """A recipe with the run around it, from the paper's section 5 and its tables 8, 9 and 10.

    learning_rate: with layer dropout; undropped_rate: without it, None for the same. batch_size: sequences per GPU.
    context: tokens per sequence (the model's). gpus: None if table 8 has no such run.
    """

    learning_rate: float
    undropped_rate: float | None = None
    batch_size: int = 4
    gpus: int | None = None
    context: int = 4096
    steps: int = 50_000

    def rate(self, dropout: LayerDropout) -> float:
        """The initial learning rate of a run with this layer dropout."""
        return self.learning_rate if dropout.p_max or self.undropped_rate is None else self.undropped_rate

    @property
    def derived_batch_size(self) -> int | None:
        """Sequences per step: table 8's per GPU times its GPUs. The paper prints no product."""
        return self.gpus and self.batch_size * self.gpus


_SCRATCH = Preset(
    LayerDropout(0.1, "exponential"), EarlyExitLoss(0.2, "rotational", None), learning_rate=8e-4, undropped_rate=4e-4, gpus=32
)
PRESETS: dict[str, Preset] = {
    "continual": Preset(LayerDropout(0.1), EarlyExitLoss(0.2, "rotational", 8), learning_rate=3e-5, gpus=64),
    "continual-13b": Preset(LayerDropout(0.1), EarlyExitLoss(0.1, "rotational", 39), learning_rate=2e-5, gpus=64),
    "continual-llama3": Preset(LayerDropout(0.1), EarlyExitLoss(0.1, "rotational", 8), learning_rate=3e-5),
    "scratch": _SCRATCH,
    "scratch-7b": replace(_SCRATCH, dropout=LayerDropout(0.2, "exponential"), undropped_rate=3e-4),
    "code": Preset(
        LayerDropout(0.1), EarlyExitLoss(1.0, "rotational", 16), learning_rate=1e-4, gpus=32, context=2048, steps=10_000
    ),
    "task": Preset(
        LayerDropout(0.2), EarlyExitLoss(1.0, "gradual", None), learning_rate=1e-4, batch_size=32, gpus=8, steps=5_800
    ),
}
"""Continual pre-training of Llama2 7B, Llama2 13B and Llama3, pre-training of a Llama 1.5B and of Llama2 7B from scratch,
fine-tuning of Llama1 7B on code, and of Llama 1.5B on one task (TOPv2). Tables 8 and 9 do not have Llama3: its learning rate,
batch and steps are those of the 7B."""
