"""A layer set that was found, in a file that knows which model it is for."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from pydantic import Field

from skipstone.core.skipping import SkipSet
from skipstone.forms import Part, read_json

VERSION = 1
SAMPLED = 64
"""Entries of every parameter that the fingerprint looks at."""


_KNOWN: WeakKeyDictionary[Any, tuple[int, str]] = WeakKeyDictionary()


class Profile(Part):
    """model: fingerprint of the weights. name: what the model was called. attention, mlp: layers, counted from 0, whose
    sublayer drafting leaves out. about: how it was found."""

    version: int = VERSION
    model: str
    name: str = ""
    attention: tuple[int, ...] = ()
    mlp: tuple[int, ...] = ()
    about: dict[str, Any] = Field(default_factory=dict)

    @property
    def skip(self) -> SkipSet:
        return SkipSet(frozenset(self.attention), frozenset(self.mlp))


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


def save(path: Path, profile: Profile) -> None:
    """Write a profile, whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(json.dumps(profile.model_dump(mode="json"), indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)


def load(path: str | Path, model: Any) -> Profile:
    """The profile of a model. OSError where there is no file; ValueError for what is no profile, and for another model's."""
    if not isinstance(path, (str, Path)):
        raise ValueError(f"profile must be the name of a file, found {path!r}")
    profile = read_json(Path(path).expanduser(), Profile, VERSION, "a layer set", path)
    if profile.model != (here := fingerprint(model)):
        raise ValueError(f"{path} is the profile of another model ({profile.name or profile.model}; this one is {here})")
    return profile
