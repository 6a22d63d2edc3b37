"""The setting `draft_quantize`, for every method that can draft with fewer bits than the target."""

from typing import Any

from skipstone.engines.engine import QUANTIZED

FEWER_BITS = tuple(one for one in QUANTIZED if one != "none")


def check_draft_quantize(value: Any) -> None:
    """ValueError for a draft_quantize that the native engine does not have."""
    if value is not None and value not in FEWER_BITS:
        raise ValueError(f"draft_quantize must be one of {', '.join(FEWER_BITS)} or none, found {value!r}")
