"""Which family a model is of: derived once per class and shape of config, and remembered on disk once it has been verified."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any
from weakref import ref

import torch
import transformers
from pydantic import TypeAdapter, ValidationError

from skipstone.files import cache_folder, digest, write_json
from skipstone.models.derivation import Underivable, derive, find_layers
from skipstone.models.families import Family, max_positions, reaches, submodule, text_config
from skipstone.models.refusals import refuse_contradiction, refuse_kind
from skipstone.models.trace import Trace, trace

VERSION = 1  # of what is remembered; what another one says is derived anew
_SAYS_NOTHING = ("_name_or_path", "transformers_version", "architectures", "dtype", "_commit_hash", "quantization_config")
"""Fields of a config that do not tell what a model is built of."""
_FAMILY = TypeAdapter(Family)


@dataclass
class Recognised:
    """What is known of a model's class and shape of config. is_verified: whether skipstone computes such a model as its own
    forward does."""

    key: str
    family: Family
    is_verified: bool

    def verified(self) -> None:
        """Remember the family, here and on disk."""
        self.is_verified = True
        with suppress(OSError, RuntimeError):  # it is derived again next time
            write_json(_place(self.key), {"family": asdict(self.family)})


_KNOWN: dict[str, Recognised] = {}
_LATEST: list[tuple[ref[Any], Trace]] = []
"""The trace that the latest family was derived from, and of which model: it is verified against the same one."""


def recognise(model: Any) -> Recognised:
    """The family of a model. ValueError where skipstone cannot decode it, saying what was found, why and what to do."""
    refuse_kind(model)
    key = _key(model)
    if key not in _KNOWN:
        remembered = _remembered(key)
        _KNOWN[key] = Recognised(key, _derived(model), False) if remembered is None else Recognised(key, remembered, True)
    return _KNOWN[key]


def traced(model: Any) -> Trace:
    """What a model's own forward does: the trace that its family was derived from, where that was just now."""
    known = next((found for of, found in _LATEST if of() is model), None)
    _LATEST.clear()
    if known is not None:
        return known
    config = text_config(model)
    path, _, layers = find_layers(model, config)
    return trace(model, submodule(model.get_decoder(), path), layers, config, max_positions(config)[0])


@torch.inference_mode()
def _derived(model: Any) -> Family:
    config = text_config(model)
    try:
        path, name, layers = find_layers(model, config)
        owner = submodule(model.get_decoder(), path)
        found = trace(model, owner, layers, config, max_positions(config)[0])
        family = derive(model, config, found, path, name)
    except Underivable as reason:
        raise ValueError(f"this {model.config.model_type} model {reason}; skipstone cannot decode it") from None
    if family.own_masks is None:
        refuse_contradiction(config, reaches(config, family), family)
    _LATEST[:] = [(ref(model), found)]
    return family


def _key(model: Any) -> str:
    """A name for a model's class and shape of config."""
    config = {name: value for name, value in vars(model.config).items() if name not in _SAYS_NOTHING}
    versions = [VERSION, transformers.__version__, torch.__version__]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    return digest([versions, kind, text_config(model)._attn_implementation, repr(config)], 32)


def _place(key: str) -> Any:
    return cache_folder() / "families" / f"{key}.json"


def _remembered(key: str) -> Family | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None  # processes that share a model run its forward together or not at all
    try:
        return _FAMILY.validate_python(json.loads(_place(key).read_text(encoding="utf-8"))["family"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, ValidationError):
        return None
