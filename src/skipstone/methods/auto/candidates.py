"""The methods that `auto` chooses from."""

from collections.abc import Sequence

from skipstone.decoding.drafter import Candidate
from skipstone.decoding.method import Method
from skipstone.engines.choose_engine import missing_room_for_copy
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.adadecode.adadecode import AdaDecode
from skipstone.methods.adadecode.heads import bundled_name_for
from skipstone.methods.autoregressive import Autoregressive
from skipstone.methods.prompt_lookup import PromptLookup
from skipstone.methods.recycle import Recycle
from skipstone.methods.self_speculative import SelfSpeculative

_LOOKUP: Method = PromptLookup()
_RECYCLE, _HEADS, _FEWER_BITS = Recycle(), AdaDecode(), SelfSpeculative(draft_quantize="int4")


def check_candidate(method: Method) -> None:
    """ValueError for a method that cannot be a candidate."""
    if method.name in ("auto", "autoregressive"):
        raise ValueError(f"{method.name} drafts nothing that could be chosen or left out")
    if not method.lossless:
        raise ValueError(f"{method.name} with these settings changes texts, so it cannot be left out here and there")


def candidates_of(methods: Sequence[Method], model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
    """The drafters of all methods, by unique names."""
    candidates: dict[str, Candidate] = {}
    for method in methods:
        for name, candidate in method.auto_candidates(model, rows, capacity).items():
            candidates[name if name not in candidates else f"{name} ({len(candidates)})"] = candidate
    return candidates


def usual_methods(model: ModelRunner, own: Method | None) -> tuple[Method, ...]:
    """The default candidates: lookups, recycled tokens, the model's own method if it is lossless, bundled exit heads, and the
    model in int4 if the native engine runs it unquantised."""
    methods = [_LOOKUP]
    if not model.family.recurrent:
        methods.append(_RECYCLE)
        if bundled_name_for(model) is not None:
            methods.append(_HEADS)
        is_unquantised = model.engine.name == "native" and model.engine.quantize is None
        if is_unquantised and missing_room_for_copy(model.model, "int4") is None:
            methods.append(_FEWER_BITS)
    if own is not None and own.lossless and type(own) not in (Autoregressive, *map(type, methods)):
        methods.append(own)
    return tuple(methods)
