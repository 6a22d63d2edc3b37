"""Finds the layers that a method drafts with, if these are whole layers."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from skipstone.decoding.settings import layer_in_range
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods import MethodLike, resolve
from skipstone.methods.drafting.layer_sets import LayerSetSpace, load_profile
from skipstone.methods.early_exit import EarlyExit
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.swift.swift import Swift
from skipstone.models.generation_config import OWN_FIELD
from skipstone.models.passes import SkipSet

DEFAULT_DRAFTS = 6  # drafts a step for a method without num_speculative_tokens


@dataclass(frozen=True)
class DraftLayers:
    """The layers that draft. layers: their numbers in the target, from 0, ascending. depth: number of the target's layers.
    drafts: maximum per step. threshold: probability below which drafting stops; None if the method has no fixed one."""

    layers: tuple[int, ...]
    depth: int
    drafts: int = DEFAULT_DRAFTS
    threshold: float | None = None

    @property
    def first(self) -> bool:
        """Whether they are the target's first layers, as in an early exit."""
        return self.layers == tuple(range(len(self.layers)))

    @property
    def described(self) -> str:
        """Their numbers as text: "layers 0 to 5 of 24"."""
        return f"{spell_layers(self.layers)} of {self.depth}"


def spell_layers(layers: Collection[int]) -> str:
    """Layer numbers as text: "layers 0 to 3, 6 and 7"."""
    numbers = sorted(layers)
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(numbers), lambda entry: entry[1] - entry[0])]
    *others, last = [f"{run[0]}" if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    listed = f"{', '.join(others)} and {last}" if others else last
    return f"{'layer' if len(numbers) == 1 else 'layers'} {listed}"


def select_draft_layers(model: ModelRunner, method: MethodLike = None, exit_layer: int | None = None) -> DraftLayers:
    """The layers that a method drafts with, those of the model's own method by default.

    exit_layer: E, for the first E layers, instead of a method. ValueError if both or none are given and the model has no method
    of its own, for a method that does not draft with whole layers, and for layers that the model does not have.
    """
    own = getattr(model.model.generation_config, OWN_FIELD, None)
    if exit_layer is not None:
        if method is not None:
            raise ValueError("give either an exit layer or a method, found both")
        layer_in_range("exit_layer", exit_layer, model)
        method = f"{LayerSkip.name} exit_layer={exit_layer}"
    elif method is None and own is None:
        raise ValueError(
            "this model names no method of its own: say which layers draft by --exit-layer E, or by --method with a layer set; "
            "`skipstone inspect MODEL` shows where an early exit would pay, `skipstone search MODEL` finds a set"
        )
    chosen: Any = resolve(method, own)
    if isinstance(chosen, (LayerSkip, EarlyExit)):
        layer_in_range("exit_layer", chosen.exit_layer, model)
        layers = tuple(range(chosen.exit_layer or 0))
    else:
        layers = _remaining_layers(_skip_set(chosen, model), model)
    drafts = getattr(chosen, "num_speculative_tokens", DEFAULT_DRAFTS)
    threshold = getattr(chosen, "confidence_threshold", None)
    return DraftLayers(layers, model.depth, drafts, threshold if isinstance(threshold, (int, float)) else None)


def _skip_set(method: Any, model: ModelRunner) -> SkipSet:
    """The layer set of a method. ValueError if it has none."""
    if isinstance(method, SelfSpeculative):
        skip = method.skip_set(model)
        if not skip.attention and not skip.mlp:
            raise ValueError(
                f"{method.name} draft_quantize={method.draft_quantize} drafts with all layers in fewer bits, and leaves none "
                "out: quantise the model with the engine's own tools"
            )
        return skip
    if isinstance(method, Swift):
        if method.profile is None:
            raise ValueError(
                "swift finds its layers while it decodes: name a set that was found before, `swift profile=FILE` "
                "(`skipstone search MODEL` writes one)"
            )
        return load_profile(method.profile, model.model).skip
    raise ValueError(
        f"{method.name} does not draft with layers of the model alone: an export needs layerskip, early_exit, or "
        "self_speculative or swift with a layer set"
    )


def _remaining_layers(skip: SkipSet, model: ModelRunner) -> tuple[int, ...]:
    """The layers that a set leaves. ValueError if it skips one sublayer of a layer alone."""
    LayerSetSpace.of(model).from_skip_set(skip)
    alone = [
        f"the {kind} of {spell_layers(layers)}"
        for kind, layers in (("attention", skip.attention - skip.mlp), ("MLP", skip.mlp - skip.attention))
        if layers
    ]
    if alone:
        raise ValueError(
            f"the set skips {' and '.join(alone)} alone: other engines have whole layers only, so skip both or none"
        )
    return tuple(layer for layer in range(model.depth) if layer not in skip.attention)
