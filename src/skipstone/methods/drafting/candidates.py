"""Prior costs of `auto`'s candidates, and the setting `draft_quantize`."""

from typing import Any, Literal

from skipstone.decoding.drafter import Candidate, Drafter
from skipstone.decoding.method import Method
from skipstone.engines.model_runner import ModelRunner
from skipstone.utils.files import digest

FewerBits = Literal["int8", "int4"]
"""Values of the setting `draft_quantize` next to none."""
QUANTIZED_STEP_COST = {"int8": 0.6, "int4": 0.35}
"""Assumed time of a quantised draft step relative to one in the stored weights, from the bytes that it reads. A replay is not
faster, because with many tokens arithmetic takes the time."""


def size_ratio(draft_model: ModelRunner, target: ModelRunner) -> float:
    """Parameters of a draft model divided by the target's, at most 1: the assumed cost of a draft step in plain steps."""
    return min(model_size(draft_model) / model_size(target), 1.0)


def model_size(runner: ModelRunner) -> int:
    """Number of a model's parameters."""
    return sum(weight.numel() for weight in runner.model.parameters())


def layer_candidate(
    drafter: Drafter, method: Method, model: ModelRunner, layers: float, *more: Any, bits: str = ""
) -> Candidate:
    """A candidate that runs `layers` layers of the target over the target's KV cache.

    more: distinguishes candidates with the same settings. Recurrent models have no replay, because their states cannot run over
    committed tokens again."""
    share = layers / model.depth
    replay = None if model.family.recurrent else share
    return Candidate(drafter, lambda: digest([method.spelled, *more]), share * QUANTIZED_STEP_COST.get(bits, 1.0), replay)
