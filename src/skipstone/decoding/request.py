"""What a request asks for: a prompt, how much to write, how to sample and when to stop."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from skipstone.decoding.sampling import Sampling
from skipstone.decoding.stop_strings import StopStrings

Criterion = Callable[[Tensor, None], Tensor]  # a transformers StoppingCriteria: (ids [1, T], None) -> bool tensor [1]


@dataclass(frozen=True)
class Request:
    """One sequence to generate.

    prompt: [T] int64, T >= 1. max_new_tokens >= 1. eos: ids that end the row (kept in the output). criteria: evaluated after
    every new token on the row's own unpadded ids. prediction: ids that it may go on with, for methods that look drafts up.
    stop_strings: end the row with the token that completes one.
    """

    prompt: Tensor
    max_new_tokens: int
    eos: frozenset[int] = frozenset()
    sampling: Sampling = field(default_factory=Sampling)
    criteria: Sequence[Criterion] = ()
    prediction: Sequence[int] = ()
    stop_strings: StopStrings | None = None
