"""A hash of a model's weights: files that were made for one model know it by this."""

import hashlib
from operator import itemgetter
from typing import Any

import torch

from skipstone.models.memo import Memo
from skipstone.models.placing import named_values
from skipstone.models.quantised import stored

SAMPLED = 64  # entries of every parameter that the fingerprint looks at
_FOUND: Memo[tuple[int, str]] = Memo()  # (sum of the versions that torch counts of the parameters, the hash of these weights)


def fingerprint(model: Any, changes: int | None = None) -> str:
    """A hash of a model's parameters: names, shapes and SAMPLED values of each in bfloat16, so that neither the device matters
    nor whether the weights are float32 or bfloat16.

    It is counted again only when a parameter has changed; what is written through `.data` goes unnoticed until then. changes:
    torch's count of the changes made to the parameters in place, where the caller knows it; None counts.
    """
    versions = _versions(model) if changes is None else changes
    return _FOUND.get(model, None, lambda: (versions, _hash(model)), lambda found: found[0] == versions)[1]


def keep(model: Any, found: str) -> None:
    """Say that a model's fingerprint is what it was, although other objects hold its weights now."""
    versions = _versions(model)
    _FOUND.get(model, None, lambda: (versions, found), lambda _: False)


def _versions(model: Any) -> int:
    """The changes in place that torch counts, over all of `model.parameters()`, which takes ten times as long."""
    total, found, seen = 0, [model], set[int]()
    while found:
        module = found.pop()
        for one in module._parameters.values():
            if one is not None and id(one) not in seen and not one.is_inference():
                seen.add(id(one))
                total += one._version
        for child in module._modules.values():
            if child is not None:
                found.append(child)
    return total


@torch.inference_mode()
def _hash(model: Any) -> str:
    found = hashlib.sha256()
    for name, parameter in sorted(stored(model, named_values(model)), key=itemgetter(0)):
        flat = parameter.detach().flatten()
        step = max(1, len(flat) // SAMPLED)
        values = flat[::step][:SAMPLED].to("cpu", torch.bfloat16).float()
        found.update(f"{name} {tuple(parameter.shape)}".encode() + values.numpy().tobytes())
    return found.hexdigest()[:16]
