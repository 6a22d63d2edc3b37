"""Which methods `auto` chooses from, and how each of them drafts there."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from skipstone.decoding.drafter import Drafter
from skipstone.decoding.method import Method
from skipstone.files import digest
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.adadecode.chain import HeadChainDrafter
from skipstone.methods.adadecode.heads import bundled_name_for
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import Recycle
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.shared.draft_model import DraftModelDrafter
from skipstone.methods.speculative import Speculative
from skipstone.methods.swift.chain import SwiftChainDrafter
from skipstone.methods.swift.swift import Swift
from skipstone.models.engines.choice import missing_room_for_copy
from skipstone.models.layered import LayeredModel
from skipstone.policy.draft_length import MAX_DRAFTS

FEWER_BITS = {"int8": 0.6, "int4": 0.35}
"""Time of a draft step in fewer bits, as a share of one in the stored weights: a first guess, from the bytes that are read. A
replay gains nothing: over many tokens arithmetic takes the time."""


@dataclass(frozen=True)
class Candidate:
    """A drafter that `auto` may choose.

    draft_step: first guess of a draft step in plain steps, None for a drafter with its own schedule. replay: first guess of a
    replay in passes of the target over as many tokens, None if it cannot be replayed. identity: tells it from others of its
    name. searches: replays are evaluations of its search.
    """

    drafter: Drafter
    identity: str
    draft_step: float | None
    replay: float | None
    searches: bool = False


Made = dict[str, Candidate]


def size_ratio(draft_model: LayeredModel, target: LayeredModel) -> float:
    """Parameters of a draft model over those of its target, at most 1: about what a draft step costs."""
    sizes = [sum(one.numel() for one in each.model.parameters()) for each in (draft_model, target)]
    return min(sizes[0] / sizes[1], 1.0)


def _of_layers(drafter: Drafter, method: Method, model: LayeredModel, layers: float, *more: Any) -> Candidate:
    """A drafter that runs so many of the target's layers, over its keys and values. A recurrent model has none."""
    share, bits = layers / model.depth, getattr(method, "draft_quantize", None) or ""
    is_searching, identity = isinstance(method, Swift), digest([method.spelled, *more])
    return Candidate(
        drafter, identity, share * FEWER_BITS.get(bits, 1.0), None if model.family.recurrent else share, is_searching
    )


def _exits(method: LayerSkip, model: LayeredModel, rows: int, capacity: int) -> Made:
    assert method.exit_layer is not None
    chain = replace(
        method,
        num_speculative_tokens=MAX_DRAFTS,
        confidence_threshold=None,
        reuse_cache=True,
        rejection_sample_method="coupled",
    )
    drafter = chain.create_drafter(model, rows, capacity)
    return {f"layerskip, exit {method.exit_layer}": _of_layers(drafter, chain, model, method.exit_layer)}


def _skipping(method: SelfSpeculative, model: LayeredModel, rows: int, capacity: int) -> Made:
    chain = replace(method, num_speculative_tokens=MAX_DRAFTS, stop_threshold=None)
    skip, name = method.skip_set(model), "self_speculative"
    left = model.depth - (len(skip.attention) + len(skip.mlp)) / 2
    made = _of_layers(chain.create_drafter(model, rows, capacity), chain, model, left, sorted(skip.attention), sorted(skip.mlp))
    return {name if method.draft_quantize is None else f"{name}, {method.draft_quantize}": made}


def _draft_model(method: Speculative, model: LayeredModel, rows: int, capacity: int) -> Made:
    draft_model, coupled = method.draft_model_for(model), replace(method, rejection_sample_method="coupled")
    drafter = DraftModelDrafter(coupled, model, draft_model, rows, capacity, MAX_DRAFTS, None)
    ratio = size_ratio(draft_model, model)
    return {"speculative": Candidate(drafter, draft_model.fingerprint, ratio, ratio)}


def _heads(method: AdaDecode, model: LayeredModel, rows: int, capacity: int) -> Made:
    heads, shortlist, found = method.heads_for(model), method.shortlist(model), {}
    for number, layer in enumerate(heads.card.layers):
        if not method.exit_layers or layer in method.exit_layers:
            drafter = HeadChainDrafter(heads, number, model, rows, MAX_DRAFTS, shortlist)
            found[f"adadecode, head {layer}"] = _of_layers(drafter, method, model, layer)
    return found


def _searched(method: Swift, model: LayeredModel, rows: int, capacity: int) -> Made:
    optimisation = method.optimisation(model)
    drafter = SwiftChainDrafter(optimisation, model, rows, MAX_DRAFTS, method.shortlist(model))
    left = model.depth - optimisation.skipped.sum() / 2
    return {"swift": _of_layers(drafter, method, model, float(left))}


def _own_schedule(method: Method, model: LayeredModel, rows: int, capacity: int) -> Made:
    """Any other method as a whole. Drafts that it would draw at random are coupled to the target's noise."""
    if hasattr(method, "rejection_sample_method"):
        method = replace(method, rejection_sample_method="coupled")  # type: ignore[call-arg]
    return {method.name: Candidate(method.create_drafter(model, rows, capacity), digest(method.spelled), None, None)}


MAKERS: dict[type[Method], Callable[[Any, LayeredModel, int, int], Made]] = {
    LayerSkip: _exits,
    SelfSpeculative: _skipping,
    Speculative: _draft_model,
    AdaDecode: _heads,
    PromptLookup: lambda *_: {},
    Recycle: lambda *_: {},
    Swift: _searched,
}
"""Method -> its drafters by name. Lookups and recycled tokens are drafted on the host, without a model."""


def check_candidate(method: Method) -> None:
    """ValueError for a method that is no candidate."""
    if method.name in ("auto", "autoregressive"):
        raise ValueError(f"{method.name} drafts nothing that could be chosen or left out")
    if not method.lossless:
        raise ValueError(f"{method.name} with these settings changes texts, so it cannot be left out here and there")


def candidates_of(methods: Sequence[Method], model: LayeredModel, rows: int, capacity: int) -> Made:
    """All drafters of the methods, each by a name of its own."""
    made: Made = {}
    for method in methods:
        for name, one in MAKERS.get(type(method), _own_schedule)(method, model, rows, capacity).items():
            made[name if name not in made else f"{name} ({len(made)})"] = one
    return made


def usual_methods(model: LayeredModel, own: Method | None) -> tuple[Method, ...]:
    """The candidates if none are named: those that need nothing, the model's own method if it is lossless, bundled heads, and
    the model in four bits if the native engine has it in more."""
    found: list[Method] = [PromptLookup()] if model.family.recurrent else [PromptLookup(), Recycle()]
    of_model: list[Method] = []
    if not model.family.recurrent:
        if bundled_name_for(model) is not None:
            of_model.append(AdaDecode())
        is_plain = model.engine.name == "native" and model.engine.quantize is None
        if is_plain and missing_room_for_copy(model.model, "int4") is None:
            of_model.append(SelfSpeculative(draft_quantize="int4"))
    if own is not None and own.lossless and type(own) not in (Autoregressive, *map(type, (*found, *of_model))):
        found.append(own)
    return (*found, *of_model)
