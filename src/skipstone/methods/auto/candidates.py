"""Which methods `auto` chooses from."""

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


def check_candidate(method: Method) -> None:
    """ValueError for a method that is no candidate."""
    if method.name in ("auto", "autoregressive"):
        raise ValueError(f"{method.name} drafts nothing that could be chosen or left out")
    if not method.lossless:
        raise ValueError(f"{method.name} with these settings changes texts, so it cannot be left out here and there")


def candidates_of(methods: Sequence[Method], model: ModelRunner, rows: int, capacity: int) -> dict[str, Candidate]:
    """All drafters of the methods, each by a name of its own."""
    made: dict[str, Candidate] = {}
    for method in methods:
        for name, one in method.auto_candidates(model, rows, capacity).items():
            made[name if name not in made else f"{name} ({len(made)})"] = one
    return made


def usual_methods(model: ModelRunner, own: Method | None) -> tuple[Method, ...]:
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
