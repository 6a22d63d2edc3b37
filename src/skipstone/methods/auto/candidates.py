"""Which methods `auto` chooses from, and how each of them drafts there."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from skipstone.decoding.method import Method
from skipstone.files import digest
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.adadecode.heads import bundled_name_for
from skipstone.methods.auto.drafters import MOST_DRAFTS, WHOLE_STEP, Candidate, LayersDrafter, SearchingDrafter, share_of
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.layerskip import LayerSkip
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import Recycle
from skipstone.methods.self_speculative import SelfSpeculative
from skipstone.methods.shared.draft_model import DraftModelDrafter
from skipstone.methods.speculative import Speculative
from skipstone.methods.swift.swift import Swift
from skipstone.models.engines.choice import missing_room_for_copy
from skipstone.models.layered import LayeredModel
from skipstone.models.passes import SkipSet

Made = dict[str, Candidate]


def _exits(method: LayerSkip, model: LayeredModel, rows: int, capacity: int) -> Made:
    assert method.exit_layer is not None
    made = LayersDrafter(model, rows, method.exit_layer, shortlist=method.shortlist(model))
    return {f"layerskip, exit {method.exit_layer}": made.candidate(method.spelled)}


def _skipping(method: SelfSpeculative, model: LayeredModel, rows: int, capacity: int) -> Made:
    skip, drafting_model = method.skip_set(model), method.drafting_model(model)
    name = f"self_speculative, {method.draft_quantize}" if drafting_model is not None else "self_speculative"
    made = LayersDrafter(model, rows, model.depth, skip or SkipSet(), drafting_model, method.shortlist(model))
    return {name: made.candidate(method.spelled)}


def _draft_model(method: Speculative, model: LayeredModel, rows: int, capacity: int) -> Made:
    draft_model, coupled = method.draft_model_for(model), replace(method, rejection_sample_method="coupled")
    made = DraftModelDrafter(coupled, model, draft_model, rows, capacity, MOST_DRAFTS, None)
    share = share_of(draft_model, model)
    return {"speculative": Candidate(made, share, share, method.spelled)}


def _heads(method: AdaDecode, model: LayeredModel, rows: int, capacity: int) -> Made:
    heads = method.heads_for(model)
    shortlist = heads.shortlist if method.draft_vocabulary is None else method.shortlist(model)
    found = {}
    for number, layer in enumerate(heads.card.layers):
        if not method.exit_layers or layer in method.exit_layers:
            made = LayersDrafter(model, rows, layer, shortlist=shortlist, head=(heads, number))
            found[f"adadecode, head {layer}"] = made.candidate(method.spelled)
    return found


def _searched(method: Swift, model: LayeredModel, rows: int, capacity: int) -> Made:
    made = SearchingDrafter(method.optimisation(model), model, rows, method.shortlist(model))
    return {"swift": made.candidate(method.spelled, searches=True)}


def _whole(method: Method, model: LayeredModel, rows: int, capacity: int) -> Made:
    """A method that no rule of ours stops. Drafts that it would draw at random are coupled to the target's noise."""
    if hasattr(method, "rejection_sample_method"):
        method = replace(method, rejection_sample_method="coupled")  # type: ignore[call-arg]
    drafter = method.create_drafter(model, rows, capacity)
    return {method.name: Candidate(drafter, WHOLE_STEP, 0.0, method.spelled, own_rule=True)}


MAKERS: dict[type[Method], Callable[[Any, LayeredModel, int, int], Made]] = {
    LayerSkip: _exits,
    SelfSpeculative: _skipping,
    Speculative: _draft_model,
    AdaDecode: _heads,
    PromptLookup: lambda *_: {},
    Recycle: lambda *_: {},
    Swift: _searched,
}
"""Method -> its drafters by name; another one drafts as a whole. What is looked up or recycled is drafted on the host, without
a model."""


def refuse(method: Method) -> None:
    """ValueError for a method that is no candidate."""
    if method.name in ("auto", "autoregressive"):
        raise ValueError(f"{method.name} drafts nothing that could be chosen or left out")
    if not method.lossless:
        raise ValueError(f"{method.name} with these settings changes texts, so it cannot be left out here and there")


def drafters_of(methods: Sequence[Method], model: LayeredModel, rows: int, capacity: int) -> Made:
    """The drafters of all candidates, each by a name of its own."""
    made: Made = {}
    for method in methods:
        for name, one in MAKERS.get(type(method), _whole)(method, model, rows, capacity).items():
            made[name if name not in made else f"{name} ({len(made)})"] = one
    return made


def identities(methods: Sequence[Method], candidates: Made) -> dict[str, str]:
    """Drafter -> what tells it apart from others that bear its name: what it was asked for as, and its draft model."""
    told = digest(sorted(one.spelled for one in methods if type(one) is AdaDecode))
    found = {}
    for name, candidate in candidates.items():
        one = candidate.drafter
        if candidate.own_rule:
            found[name] = digest(candidate.spelled)
        elif isinstance(one, DraftModelDrafter):
            found[name] = one.draft_model.fingerprint
        elif isinstance(one, LayersDrafter):
            skip = None if one.skip is None else [sorted(one.skip.attention), sorted(one.skip.mlp)]
            few = None if one.drafting_model is None else str(one.drafting_model.engine.quantize)
            ids = None if one.shortlist is None else digest(one.shortlist.tolist())
            found[name] = digest([one.layers, skip, few, ids, told if one.head is not None else None])
    return found


def usual(model: LayeredModel, own: Method | None) -> tuple[Method, ...]:
    """The candidates where none are named: those that need nothing, the model's own method, where that can be one, what is
    bundled for the model, and the model in four bits where the native engine has it in more. Of several that could be as fast
    the first one is tried first."""
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
