"""Which layers of a model a method drafts with, where these are whole layers."""

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from skipstone.decoding.method import Method
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

MOST_DRAFTS = 6  # drafts a step for a method that says nothing of them


@dataclass(frozen=True)
class DraftLayers:
    """The layers that draft. layers: their numbers in the target, from 0, ascending. depth: layers of the target. drafts: most
    drafts a step. threshold: the probability below which drafting stops; None where the method has no fixed one."""

    layers: tuple[int, ...]
    depth: int
    drafts: int = MOST_DRAFTS
    threshold: float | None = None

    @property
    def first(self) -> bool:
        """Whether they are the first ones, as in an early exit."""
        return self.layers == tuple(range(len(self.layers)))

    @property
    def described(self) -> str:
        """Which they are, for people: "layers 0 to 5 of 24"."""
        return f"{spelled(self.layers)} of {self.depth}"


def spelled(layers: Collection[int]) -> str:
    """Layer numbers for people: "layers 0 to 3, 6 and 7"."""
    numbers = sorted(layers)
    starts = [numbers[0], *(after for before, after in pairwise(numbers) if after != before + 1)]
    ends = [*(before for before, after in pairwise(numbers) if after != before + 1), numbers[-1]]
    runs = [f"{start}" if start == end else f"{start} to {end}" for start, end in zip(starts, ends, strict=True)]
    told = runs[0] if len(runs) == 1 else f"{', '.join(runs[:-1])} and {runs[-1]}"
    return f"{'layer' if len(numbers) == 1 else 'layers'} {told}"


def kept(model: ModelRunner, method: MethodLike = None, exit_layer: int | None = None) -> DraftLayers:
    """The layers that a method drafts with, those of the model's own method by default.

    exit_layer: E, the first E layers, instead of a method. ValueError where nothing says which layers draft, where two things
    say it, for a method that drafts with anything else than whole layers, and for layers that the model does not have.
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
    found = resolve(method, own)
    layers = _layers(found, model)
    drafts = getattr(found, "num_speculative_tokens", MOST_DRAFTS)
    threshold = getattr(found, "confidence_threshold", None)
    return DraftLayers(layers, model.depth, drafts, threshold if isinstance(threshold, (int, float)) else None)


def _layers(method: Method, model: ModelRunner) -> tuple[int, ...]:
    """The layers that a method drafts with."""
    if isinstance(method, (LayerSkip, EarlyExit)):
        layer_in_range("exit_layer", method.exit_layer, model)
        assert method.exit_layer is not None
        return tuple(range(method.exit_layer))
    return _without(_skip_set(method, model), model)


def _skip_set(method: Any, model: ModelRunner) -> SkipSet:
    """The layer set of a method. ValueError where it has none."""
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


def _without(skip: SkipSet, model: ModelRunner) -> tuple[int, ...]:
    """The layers that a set leaves. ValueError where it skips a sublayer and keeps the other one of its layer."""
    LayerSetSpace.of(model).from_skip_set(skip)
    alone = [
        f"the {kind} of {spelled(layers)}"
        for kind, layers in (("attention", skip.attention - skip.mlp), ("MLP", skip.mlp - skip.attention))
        if layers
    ]
    if alone:
        raise ValueError(
            f"the set skips {' and '.join(alone)} alone, and other engines have whole layers only: leave out both sublayers "
            "of a layer, or neither"
        )
    return tuple(layer for layer in range(model.depth) if layer not in skip.attention)
