"""What a call returns: Hugging Face's output with our figures."""

from dataclasses import dataclass
from typing import Any

from transformers.generation.utils import GenerateDecoderOnlyOutput

from skipstone.decoding.stats import Stats
from skipstone.decoding.step import Step


@dataclass
class Output(GenerateDecoderOnlyOutput):
    """What `skipstone.generate` returns: Hugging Face's output with our figures.

    sequences: [B, T] int64, prompt and new tokens, padded by HF's rules. scores, logits: per new token [B, V], when asked
    for (0 for rows already finished). lossless: False only for modes that may change the text. text: the new text of every row
    when text came in. stats: `Stats` over all rows. steps: the list of `Step`, with record=True.
    """

    stats: Stats | None = None
    new_tokens: list[list[int]] | None = None
    text: Any = None
    method: str | None = None
    lossless: bool | None = None
    steps: list[Step] | None = None
