"""Finds the family of a model: derived once per class and config, and cached on disk after its verification."""

import json
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from pydantic import TypeAdapter

from skipstone.models.derivation import DerivationError, derive, find_layers
from skipstone.models.families import Family, attention_reaches, layer_types, max_positions, submodule, text_config
from skipstone.models.known_types import TESTED
from skipstone.models.mapped_config import MappedConfig, UnmappableError
from skipstone.models.mapped_model import MappedModel, family_of
from skipstone.models.nan_checks import refuse_not_finite, refuse_overflow
from skipstone.models.trace import TOKENS, WINDOWED, Trace, trace
from skipstone.models.unsupported import refuse_contradiction, refuse_kind
from skipstone.models.weight_version import ModelVersion, model_version
from skipstone.utils.files import cache_place, digest, write_cache

_SAYS_NOTHING = ("_name_or_path", "transformers_version", "architectures", "dtype", "_commit_hash", "quantization_config")
"""Fields of a config that do not describe the structure of a model."""
UNEXPECTED = (TypeError, AttributeError, RuntimeError, LookupError, ValueError, AssertionError)
"""Errors of a forward that is called in an unexpected way."""
LIMITS = re.compile(r"window|chunk|local|block_size")
"""Parts of the names of fields that may limit attention."""


@dataclass
class RecognisedModel:
    """The family of a class and config. is_verified: skipstone computes such models as their own forward does, as its tests or
    a check on this machine have shown."""

    key: str
    family: Family
    is_verified: bool

    def verified(self) -> None:
        """Mark the family as verified, in memory and on disk."""
        self.is_verified = True
        write_cache(_place(self.key), {"family": asdict(self.family)})


_KNOWN: dict[str, RecognisedModel] = {}
_LATEST: list[tuple[ref[Any], ModelVersion, Trace]] = []
"""(model, its version, trace) of the last derived family, which is verified with the same trace."""


def recognise(model: Any) -> RecognisedModel:
    """The family of a model. ValueError with cause and remedy if skipstone cannot decode it."""
    if isinstance(model, MappedModel):
        return RecognisedModel("", model.family, True)
    refuse_kind(model)
    is_tested = model.config.model_type in TESTED and _has_original_modules(model)
    if is_tested and (family := _known_family(model.config)) is not None:
        return RecognisedModel("", family, True)
    key = _key(model)
    if key not in _KNOWN:
        remembered = _remembered(key)
        _KNOWN[key] = RecognisedModel(key, remembered or derived_family(model), remembered is not None)
        if remembered is None and is_tested:
            _KNOWN[key].verified()
    return _KNOWN[key]


def _has_original_modules(model: Any) -> bool:
    """Whether all modules are of classes of torch and transformers."""
    return all(type(part).__module__.startswith(("transformers.", "torch.nn.")) for part in model.modules())


def _known_family(config: Any) -> Family | None:
    """The family of a model type that the native engine runs, from its config alone; None for any other."""
    try:
        kinds = MappedConfig(config.to_dict()).kinds_of_layers
    except (UnmappableError, *UNEXPECTED):
        return None
    if kinds != layer_types(config):
        return None
    family = family_of(config, kinds)
    return replace(family, float_masks=True) if config._attn_implementation == "eager" else family


def traced(model: Any) -> Trace:
    """A trace of a model's own forward: that of its derivation if it has just been derived."""
    known = next((record for of, version, record in _LATEST if of() is model and version == model_version(model)), None)
    _LATEST.clear()
    if known is not None:
        return known
    return _trace(model)[2]


def _trace(model: Any) -> tuple[str, str, Trace]:
    """(path to the owner of a model's layers, name of their list, trace of its forward)."""
    config = text_config(model)
    path, name, layers = find_layers(model, config)
    owner = submodule(model.get_decoder(), path)
    return path, name, trace(model, owner, layers, config, max_positions(config)[0])


@torch.no_grad()
def derived_family(model: Any) -> Family:
    """The family of a model, from a trace of its own forward. ValueError if skipstone cannot decode it."""
    config, record = text_config(model), None
    try:
        path, name, record = _trace(model)
        family = derive(model, config, record, path, name)
        _expect_no_other_limits(config, family)
    except DerivationError as reason:
        refuse_not_finite(model)
        if record is not None:
            refuse_overflow(model, record.logits)
        raise ValueError(f"this {model.config.model_type} model {reason}; skipstone cannot decode it") from None
    except torch.OutOfMemoryError:
        raise
    except (*UNEXPECTED, StopIteration) as error:
        refuse_not_finite(model)
        raise ValueError(f"the forward of this {model.config.model_type} model cannot be followed: {error}") from error
    if family.mask_buffer_path is None:
        refuse_contradiction(config, attention_reaches(config, family), family)
    _LATEST[:] = [(ref(model), model_version(model), record)]
    return family


def _expect_no_other_limits(config: Any, family: Family) -> None:
    """DerivationError for an untested type if its config may limit attention in a way that a short forward does not show."""
    if config.model_type in TESTED:
        return
    for name, value in config.to_dict().items():
        limits = LIMITS.search(name) and "layer" not in name and type(value) is int and value > TOKENS
        if limits and name not in (*WINDOWED, family.window):
            raise DerivationError(f"has {name}={value} in its config, which nobody has looked at")


def _key(model: Any) -> str:
    """A cache key of a model's config, dtype and module classes, and of skipstone's code that examines them."""
    config = {name: value for name, value in vars(model.config).items() if name not in _SAYS_NOTHING}
    import transformers

    versions = [_sources(), transformers.__version__, torch.__version__]
    modules = [(path, f"{type(one).__module__}.{type(one).__qualname__}") for path, one in model.named_modules()]
    return digest([versions, str(model.dtype), modules, text_config(model)._attn_implementation, repr(config)], 32)


@cache
def _sources() -> str:
    """A hash of skipstone's sources that derive and verify."""
    package = Path(__file__).parents[1]
    files = [path for folder in ("models", "engines", "engines/eager") for path in sorted((package / folder).glob("*.py"))]
    return digest([path.read_text(encoding="utf-8") for path in files], 32)


def _place(key: str) -> Path | None:
    return cache_place("families", f"{key}.json")


def _remembered(key: str) -> Family | None:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return None  # processes that share a model must all run its forward or none
    if (place := _place(key)) is None or not place.exists():
        return None
    try:
        held = json.loads(place.read_text(encoding="utf-8"))["family"]
        return TypeAdapter(Family).validate_python(held) if held.keys() == {one.name for one in fields(Family)} else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # damaged; it is derived again
        return None
