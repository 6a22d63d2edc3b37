"""A model's own generation defaults: out of the way while others are wanted, and read from the disk."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from transformers import GenerationConfig, PreTrainedModel


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
