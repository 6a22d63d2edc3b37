"""A model's own generation defaults, out of the way while it is measured or checked."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers import GenerationConfig, PreTrainedModel


@contextmanager
def neutral_defaults(model: PreTrainedModel, stop_at_eos: bool = False) -> Iterator[None]:
    """The same options for everybody: the model's own generation defaults are left out inside, and put back afterwards.

    stop_at_eos: False ignores the end-of-sequence token, so that all texts have the same number of tokens.
    """
    own: Any = model.generation_config
    eos = own.eos_token_id if stop_at_eos else None
    pad = 0 if own.pad_token_id is None else own.pad_token_id
    model.generation_config = GenerationConfig(eos_token_id=eos, pad_token_id=pad)
    try:
        yield
    finally:
        model.generation_config = own
