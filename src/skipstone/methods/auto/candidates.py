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
    methods: list[Method] = [PromptLookup()]
    if not model.family.recurrent:
        methods.append(Recycle())
        if bundled_name_for(model) is not None:
            methods.append(AdaDecode())
        is_unquantised = model.engine.name == "native" and model.engine.quantize is None
        if is_unquantised and missing_room_for_copy(model.model, "int4") is None:
            methods.append(SelfSpeculative(draft_quantize="int4"))
    if own is not None and own.lossless and type(own) not in (Autoregressive, *map(type, methods)):
        methods.append(own)
    return tuple(methods)
