"""Which methods `auto` chooses from, and how each of them drafts there."""

from collections.abc import Callable, Sequence
from typing import Any

from skipstone.decoding.method import Method
from skipstone.methods.auto.drafters import Drafter, LayersDrafter, ModelDrafter
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import Recycle
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.speculative import Speculative
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import SkipSet

Made = dict[str, Drafter]


def _exits(method: LayerSkip, model: LayeredModel, rows: int, capacity: int) -> Made:
    assert method.exit_layer is not None
    made = LayersDrafter(model, rows, capacity, method.exit_layer, shortlist=method.shortlist(model))
    return {f"layerskip, exit {method.exit_layer}": made}


def _skipping(method: SelfSpeculative, model: LayeredModel, rows: int, capacity: int) -> Made:
    skip, drafter = method.skip_set(model), method.drafter(model)
    name = f"self_speculative, {method.draft_quantize}" if drafter is not None else "self_speculative"
    return {name: LayersDrafter(model, rows, capacity, model.depth, skip or SkipSet(), drafter, method.shortlist(model))}


def _draft_model(method: Speculative, model: LayeredModel, rows: int, capacity: int) -> Made:
    return {"speculative": ModelDrafter(method, model, method.draft_model_for(model), rows, capacity)}


MAKERS: dict[type[Method], Callable[[Any, LayeredModel, int, int], Made]] = {
    LayerSkip: _exits,
    SelfSpeculative: _skipping,
    Speculative: _draft_model,
    PromptLookup: lambda *_: {},
    Recycle: lambda *_: {},
}
"""Method -> its drafters by name. What is looked up or recycled is drafted on the host, without a model."""


def drafters_of(methods: Sequence[Method], model: LayeredModel, rows: int, capacity: int) -> Made:
    """The drafters of all candidates, each by a name of its own. ValueError for a method that is no candidate."""
    made: Made = {}
    for method in methods:
        make = MAKERS.get(type(method))
        if make is None:
            names = ", ".join(kind.name for kind in MAKERS)
            raise ValueError(f"{method.name} cannot be one of auto's candidates; these can: {names}")
        for name, one in make(method, model, rows, capacity).items():
            made[name if name not in made else f"{name} ({len(made)})"] = one
    return made


def usual(model: LayeredModel) -> tuple[Method, ...]:
    """The candidates where none are named: those that need nothing."""
    found: list[Method] = [PromptLookup()]
    if not model.family.recurrent:
        found.append(Recycle())
    return tuple(found)
