"""Checks weights and results for NaN and infinity."""

from typing import Any

import torch

READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def first_not_finite(model: Any) -> str | None:
    """The name of the first parameter with NaN or infinity; None if all readable ones are finite."""
    for name, weight in model.named_parameters():
        readable = weight.dtype in READABLE and weight.device.type != "meta"
        if readable and not bool(torch.isfinite(weight.detach()).all()):
            return name
    return None


def refuse_not_finite(model: Any) -> None:
    """ValueError if a weight is not finite, which explains any other error."""
    if (name := first_not_finite(model)) is not None:
        raise ValueError(
            f"the weights of this {model.config.model_type} model are not finite: {name} holds NaN or infinity; download or "
            "convert the checkpoint again, or go back to one from before its training diverged"
        )


def refuse_overflow(model: Any, result: Any) -> None:
    """ValueError if a model with finite weights computes NaN or infinity. result: a computed tensor."""
    if not bool(torch.isfinite(result).all()):
        raise ValueError(f"this {model.config.model_type} model computes NaN or infinity, and {overflow(model.dtype)}")


def overflow(dtype: torch.dtype) -> str:
    """Cause and remedy for NaN or infinity with finite weights, as a clause."""
    if dtype is torch.float16:
        return f"its weights are finite: it overflows {dtype}; load it in bfloat16 or float32"
    return (
        "its weights are finite: fetch the checkpoint again, or correct what is too large or too small in its weights or its "
        "config, such as the epsilon of its norms"
    )
