"""A request: a prompt, the number of new tokens, how to sample and when to stop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from skipstone.decoding.sampling import Sampling
from skipstone.decoding.stop_strings import StopStrings

Criterion = Callable[[Tensor, None], Tensor]  # a transformers StoppingCriteria: (ids [1, T], None) -> bool tensor [1]


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    prompt: [T] int64, T >= 1. max_new_tokens >= 1. eos: ids that end the row (kept in the output). criteria: evaluated after
    every new token on the row's unpadded ids. prediction: ids of the expected text, for methods that look drafts up.
    stop_strings: the token that completes one ends the row.
    """

    prompt: Tensor
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    criteria: Sequence[Criterion] = ()
    prediction: Sequence[int] = ()
    stop_strings: StopStrings | None = None


def generation_options(
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float | None = None,
    stop: Sequence[str] | None = None,
    ignore_eos: bool = False,
) -> dict[str, Any]:
    """vLLM's names of a request's settings -> keyword arguments of `skipstone.generate`. None: the model's own value.

    temperature: 0 is greedy and ignores top_k, top_p and min_p. stop: strings that end the text, instead of the model's own.
    """
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "repetition_penalty": repetition_penalty}
    if temperature is not None:
        options["do_sample"] = temperature > 0
    if temperature != 0:
        options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    options["stop_strings"] = list(stop) if stop else None
    options = {name: value for name, value in options.items() if value is not None}
    return options | ({"eos_token_id": None} if ignore_eos else {})
