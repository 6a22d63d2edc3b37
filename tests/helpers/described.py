"""Requests in a form that can be compared."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.request import Request


def described(request: Request) -> dict[str, Any]:
    """The fields of a request. What its processors and warpers do counts, not their types."""
    sampling = {one.name: getattr(request.sampling, one.name) for one in fields(request.sampling)}
    for name in ("processors", "warpers"):
        sampling[name] = [_applied(sampling[name], request.prompt, added) for added in range(4)]
    return {
        **{one.name: getattr(request, one.name) for one in fields(request)},
        "prompt": request.prompt.tolist(),
        "prediction": list(request.prediction),
        "sampling": sampling,
        "criteria": [type(one) for one in request.criteria],
        "stop_strings": request.stop_strings and request.stop_strings.strings,
    }


def _applied(processors: Sequence[Any], prompt: Tensor, added: int) -> list[float]:
    """The scores of the token after a prompt and `added` further ones."""
    ids, scores = torch.cat([prompt, torch.arange(59, 59 + added)])[None], torch.linspace(-3, 3, 97)[None]
    for processor in processors:
        scores = processor(ids, scores)
    return scores[0].tolist()
