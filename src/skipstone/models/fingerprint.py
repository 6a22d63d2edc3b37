"""A hash of a model's weights: files that were made for one model know it by this."""

from __future__ import annotations

import hashlib
from typing import Any
from weakref import WeakKeyDictionary

import torch

SAMPLED = 64
"""Entries of every parameter that the fingerprint looks at."""
_KNOWN: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


@torch.inference_mode()
def fingerprint(model: Any) -> str:
    """A hash of a model's parameters: names, shapes and SAMPLED values of each, in bfloat16: the device does not matter,
    nor whether the weights are float32 or bfloat16. Counted again only when a parameter has changed (what is written through
    `.data` goes unnoticed until then)."""
    state = sum(one._version for one in model.parameters() if not one.is_inference())
    if model not in _KNOWN or _KNOWN[model][0] != state:
        _KNOWN[model] = (state, _fingerprint(model))
    return _KNOWN[model][1]


def _fingerprint(model: Any) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        flat = parameter.detach().flatten()
        step = max(1, len(flat) // SAMPLED)
        values = flat[::step][:SAMPLED].to("cpu", torch.bfloat16).float()
        found.update(f"{name} {tuple(parameter.shape)}".encode() + values.numpy().tobytes())
    return found.hexdigest()[:16]
