"""Weights and results that are no numbers."""

from typing import Any

import torch

READABLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@torch.no_grad()
def first_not_finite(model: Any) -> str | None:
    """The name of the first parameter that holds NaN or infinity; None where all are finite, or cannot be read."""
    for name, weight in model.named_parameters():
        readable = weight.dtype in READABLE and weight.device.type != "meta"
        if readable and not bool(torch.isfinite(weight.detach()).all()):
            return name
    return None


def refuse_not_finite(model: Any) -> None:
    """ValueError where a weight is not finite: it explains whatever else was found."""
    if (name := first_not_finite(model)) is not None:
        raise ValueError(
            f"the weights of this {model.config.model_type} model are not finite: {name} holds NaN or infinity; download or "
            "convert the checkpoint again, or go back to one from before its training diverged"
        )


def refuse_overflow(model: Any, result: Any) -> None:
    """ValueError where a model with finite weights computes NaN or infinity. result: a tensor that it has computed."""
    if not bool(torch.isfinite(result).all()):
        raise ValueError(f"this {model.config.model_type} model computes NaN or infinity, and {overflow(model.dtype)}")


def overflow(dtype: torch.dtype) -> str:
    """Why a model of finite weights computes NaN or infinity, and what to do: a clause."""
    if dtype is torch.float16:
        return f"its weights are finite: it overflows {dtype}; load it in bfloat16 or float32"
    return (
        "its weights are finite: fetch the checkpoint again, or correct what is too large or too small in its weights or its "
        "config, such as the epsilon of its norms"
    )
