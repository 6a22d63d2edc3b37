"""The output of `skipstone.generate`."""

from dataclasses import dataclass
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

from skipstone.decoding.draft import Step
from skipstone.decoding.stats import Stats


@dataclass
class Output(GenerateDecoderOnlyOutput):
    """Output of `skipstone.generate`: that of Hugging Face with figures of skipstone.

    sequences: [B, T] int64, prompt and new tokens, padded as in transformers. scores, logits: per new token [B, V] if
    requested, 0 for finished rows. lossless: False for modes that may change the text. text: the new text of every row, if the
    inputs were text. stats: `Stats` over all rows. steps: list of `Step`, with record=True. engine: "eager", "native" or
    "compiled". engine_reason: why engine="auto" did not choose the native one. quantize: "int8" or "int4" if the engine has
    quantised the weights, else None.
    """

    stats: Stats | None = None
    new_tokens: list[list[int]] | None = None
    text: Any = None
    method: str | None = None
    lossless: bool | None = None
    steps: list[Step] | None = None
    engine: str | None = None
    engine_reason: str | None = None
    quantize: str | None = None
