"""What `auto` guesses of drafters before it has measured them, and the setting `draft_quantize`."""

from typing import Any

from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.method import Method
from skipstone.engines.model_runner import ModelRunner
from skipstone.utils.files import digest

FEWER_BITS = {"int8": 0.6, "int4": 0.35}
"""Time of a draft step in fewer bits, as a share of one in the stored weights: a first guess, from the bytes that are read. A
replay gains nothing: over many tokens arithmetic takes the time."""


def size_ratio(draft_model: ModelRunner, target: ModelRunner) -> float:
    """Parameters of a draft model over those of its target, at most 1: about what a draft step costs."""
    sizes = [sum(one.numel() for one in each.model.parameters()) for each in (draft_model, target)]
    return min(sizes[0] / sizes[1], 1.0)


def of_layers(drafter: Drafter, method: Method, model: ModelRunner, layers: float, *more: Any, bits: str = "") -> Candidate:
    """A drafter that runs so many of the target's layers, over its keys and values. The states of a recurrent model cannot be
    run over committed tokens once more, so it is not replayed. more: what tells it from others of its name and settings."""
    share = layers / model.depth
    replay = None if model.family.recurrent else share
    return Candidate(drafter, lambda: digest([method.spelled, *more]), share * FEWER_BITS.get(bits, 1.0), replay)


def check_draft_quantize(value: Any) -> None:
    """ValueError for a draft_quantize that the native engine does not have."""
    if value is not None and value not in FEWER_BITS:
        raise ValueError(f"draft_quantize must be one of {', '.join(FEWER_BITS)} or none, found {value!r}")
