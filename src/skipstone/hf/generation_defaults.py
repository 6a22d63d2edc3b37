"""A model's own generation defaults: replaced by a user, checked before anybody asks, put aside while others are wanted."""

import difflib
import json
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from skipstone.engines.loading import KEPT_DEFAULTS, build_generation_config
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf.build_request import build_request
from skipstone.hf.generation_config_fields import FIELDS
from skipstone.models.generation_config import refuse_wrong_types

OVERRIDE = "--override-generation-config"
"""The option of the command line that changes single fields."""


def replace_defaults(model: PreTrainedModel, replacement: Mapping[str, Any] | None, overrides: Mapping[str, Any]) -> None:
    """Give a model other generation defaults. replacement: instead of its own, None for its own. overrides: fields that win
    over both; None unsets one. ValueError for a field that does not exist or has the wrong type."""
    if unknown := [name for name in overrides if name not in FIELDS]:
        close = difflib.get_close_matches(unknown[0], FIELDS, n=1)
        raise ValueError(f"{OVERRIDE}: there is no field {unknown[0]!r}" + (f"; did you mean {close[0]}?" if close else ""))
    refuse_wrong_types(overrides, OVERRIDE)
    own: Any = model.generation_config
    kept = {name: getattr(own, name, None) for name in KEPT_DEFAULTS}
    fields = own.to_dict() if replacement is None else {**kept, **replacement}
    model.generation_config = build_generation_config({**fields, **overrides}, "the chosen generation config")


def expect_usable_defaults(model: ModelRunner, tokenizer: Any) -> None:
    """ValueError for defaults with which no request could be answered, greedily or at random."""
    for options in ({}, {"do_sample": True, "temperature": 1.0}):
        try:
            build_request(model, [0], tokenizer, 0, {**options, "max_new_tokens": model.max_positions})
        except (ValueError, TypeError, AttributeError, IndexError, RuntimeError) as error:  # transformers checks few of them
            raise ValueError(
                f"the model's generation config cannot be used: {str(error).rstrip('.')}. Correct generation_config.json, pass "
                f"--generation-config none, or unset the field: {OVERRIDE} '{json.dumps({'FIELD': None})}'"
            ) from error


@contextmanager
def defaults_of(model: PreTrainedModel, wanted: GenerationConfig) -> Iterator[None]:
    """Other generation defaults inside; the model's own are put back afterwards."""
    own: Any = model.generation_config
    model.generation_config = wanted
    try:
        yield
    finally:
        model.generation_config = own


def neutral_defaults(model: PreTrainedModel, stop_at_eos: bool = False) -> AbstractContextManager[None]:
    """A context with the same options for everybody: the model's own generation defaults are left out inside, and put back.

    stop_at_eos: False ignores the end-of-sequence token, so that all texts have the same number of tokens.
    """
    own: Any = model.generation_config
    pad = 0 if own.pad_token_id is None else own.pad_token_id
    return defaults_of(model, GenerationConfig(eos_token_id=own.eos_token_id if stop_at_eos else None, pad_token_id=pad))


def saved_field(folder: Path, name: str) -> Any:
    """A field of the generation defaults of a model on the disk, None where they have none of that name."""
    return getattr(GenerationConfig.from_pretrained(folder), name, None)
