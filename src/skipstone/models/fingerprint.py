"""A hash of a model's weights. Files made for a model identify it by this hash."""

import hashlib
from operator import itemgetter
from typing import Any

import torch

from skipstone.models.device_map import named_values
from skipstone.models.mapped_model import MappedModel
from skipstone.models.per_model_cache import PerModelCache
from skipstone.models.quantised_checkpoints import stored_tensors
from skipstone.models.weight_version import model_version

SAMPLED = 64  # hashed entries of every parameter
_FOUND: PerModelCache[tuple[int, str]] = PerModelCache()  # (version of the weights, their hash)


def fingerprint(model: Any, version: int | None = None) -> str:
    """A hash of a model's parameters: names, shapes and SAMPLED values in bfloat16. It does not depend on the device, or on
    float32 versus bfloat16.

    It is computed again only after the weights have changed (`weight_version`). version: of the weights, if known.
    """
    weights = model_version(model).weights if version is None else version
    return _FOUND.get(model, None, lambda: (weights, _hash(model)), lambda found: found[0] == weights)[1]


@torch.inference_mode()
def _hash(model: Any) -> str:
    digest, values = hashlib.sha256(), named_values(model)
    if isinstance(model, MappedModel):
        values = model.stored_values()
    for name, parameter in sorted(stored_tensors(model, values), key=itemgetter(0)):
        flat = parameter.detach().flatten()
        step = max(1, len(flat) // SAMPLED)
        values = flat[::step][:SAMPLED].to("cpu", torch.bfloat16).float()
        digest.update(f"{name} {tuple(parameter.shape)}".encode() + values.numpy().tobytes())
    return digest.hexdigest()[:16]
