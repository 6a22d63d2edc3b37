"""Which family a model is of: derived once per class and shape of config, and remembered on disk once it has been verified."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch
import transformers
from pydantic import TypeAdapter, ValidationError

from skipstone.files import cache_folder, digest, write_json
from skipstone.models.derivation import Underivable, derive, find_layers
from skipstone.models.families import Family, max_positions, reaches, submodule, text_config
from skipstone.models.refusals import refuse_contradiction, refuse_kind
from skipstone.models.trace import Trace, trace

VERSION = 1  # of what is remembered; what another one says is derived anew
_SAYS_NOTHING = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")
"""Fields of a config that do not tell what a model is built of."""
_FAMILY = TypeAdapter(Family)


@dataclass
class Recognised:
    """What is known of a model's class and shape of config. found: the trace that it was derived from, None once it has been
    verified."""

    key: str
    family: Family
    found: Trace | None = None

    def verified(self) -> None:
        """Remember the family, here and on disk."""
        self.found = None
        with suppress(OSError, RuntimeError):  # it is derived again next time
            write_json(_place(self.key), {"family": asdict(self.family)})


_KNOWN: dict[str, Recognised] = {}


def recognise(model: Any) -> Recognised:
    """The family of a model. ValueError where skipstone cannot decode it, saying what was found, why and what to do."""
    refuse_kind(model)
    key = _key(model)
    if key not in _KNOWN:
        remembered = _remembered(key)
        _KNOWN[key] = _derived(model, key) if remembered is None else Recognised(key, remembered)
    return _KNOWN[key]


@torch.inference_mode()
def _derived(model: Any, key: str) -> Recognised:
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
    return Recognised(key, family, found)


def _key(model: Any) -> str:
    """A name for a model's class and shape of config."""
    config = {name: value for name, value in model.config.to_dict().items() if name not in _SAYS_NOTHING}
    versions = [VERSION, transformers.__version__, torch.__version__]
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    return digest([versions, kind, text_config(model)._attn_implementation, repr(config)], 32)


def _place(key: str) -> Any:
    return cache_folder() / "families" / f"{key}.json"


def _remembered(key: str) -> Family | None:
    try:
        return _FAMILY.validate_python(json.loads(_place(key).read_text(encoding="utf-8"))["family"])
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, ValidationError):
        return None
