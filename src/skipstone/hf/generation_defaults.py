"""A model's generation defaults: replace them, check them at the start, or use others for a while."""

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.build_request import build_request
from skipstone.hf.generation_config_fields import FIELDS
from skipstone.models.generation_config import KEPT_DEFAULTS, GenerationFields, refuse_small_values, refuse_wrong_types
from skipstone.models.mapped_model import MappedModel

if TYPE_CHECKING:
    from transformers import GenerationConfig

OVERRIDE = "--override-generation-config"
"""The option of the command line that changes single fields."""


def replace_defaults(model: Any, replacement: Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> None:
    """Give a model other generation defaults. ValueError for unknown fields and wrong types.

    replacement: new defaults, None to keep the model's. overrides: fields that override both; a value of None unsets one."""
    if unknown := [name for name in overrides if name not in FIELDS]:
        close = difflib.get_close_matches(unknown[0], FIELDS, n=1)
        raise ValueError(f"{OVERRIDE}: there is no field {unknown[0]!r}" + (f"; did you mean {close[0]}?" if close else ""))
    refuse_wrong_types(overrides, OVERRIDE)
    own: Any = model.generation_config
    preserved = {name: getattr(own, name, None) for name in KEPT_DEFAULTS}
    fields = own.to_dict() if replacement is None else {**preserved, **replacement}
    fields, source = {**fields, **overrides}, "the chosen generation config"
    if isinstance(model, MappedModel):
        refuse_wrong_types(fields, source)
        refuse_small_values(fields)
        model.generation_config = GenerationFields(fields)
    else:
        from skipstone.engines.loading import build_generation_config

        model.generation_config = build_generation_config(fields, source)


def expect_usable_defaults(model: ModelRunner, tokenizer: Any) -> None:
    """ValueError for defaults that make every greedy or every sampled request fail."""
    for options in ({}, {"do_sample": True, "temperature": 1.0}):
        try:
            build_request(model, [0], tokenizer, 0, {**options, "max_new_tokens": model.max_positions})
        except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:  # transformers checks few fields
            raise ValueError(
                f"the model's generation config cannot be used: {str(error).rstrip('.')}. Correct generation_config.json, pass "
                f"--generation-config none, or unset the field: {OVERRIDE} '{json.dumps({'FIELD': None})}'"
            ) from error


@contextmanager
def defaults_of(model: Any, config: "GenerationConfig") -> Iterator[None]:
    """Use other generation defaults in a block, and restore the model's own after it."""
    own: Any = model.generation_config
    model.generation_config = config
    try:
        yield
    finally:
        model.generation_config = own


def neutral_defaults(model: Any, stop_at_eos: bool = False) -> AbstractContextManager[None]:
    """A context that ignores the model's generation defaults, except its token ids.

    stop_at_eos: False ignores the end-of-sequence token, too, so that all texts have the same number of tokens.
    """
    own: Any = model.generation_config
    pad = 0 if own.pad_token_id is None else own.pad_token_id
    from transformers import GenerationConfig

    return defaults_of(model, GenerationConfig(eos_token_id=own.eos_token_id if stop_at_eos else None, pad_token_id=pad))


def saved_field(folder: Path, name: str) -> Any:
    """A field of the generation defaults of a model on the disk; None if it does not exist."""
    from transformers import GenerationConfig

    return getattr(GenerationConfig.from_pretrained(folder), name, None)
