"""One timed call, and the order of all of them.

Every row of the benchmark is an engine behind the same two lines: a prompt and transformers' options in, emitted ids out. The
tokens counted are those ids; nothing is tokenised again. Rows take turns prompt by prompt in rotating order, so that a machine
that slows down slows all of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from skipstone import api
from skipstone.core.protocol import Method
from skipstone.core.types import Stats


@dataclass(frozen=True)
class Emitted:
    """What one call gave: the new ids, without the prompt, and our own figures where the engine is ours."""

    tokens: list[int]
    stats: Stats | None = None


class Engine(Protocol):
    """Something that decodes. settings: what to print of it."""

    @property
    def settings(self) -> dict[str, Any]: ...

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> Emitted:
        """Continue a prompt [1, T] under options of `model.generate`. seed: for engines with random numbers of their own;
        torch's generator is seeded by the caller."""
        ...


@dataclass(frozen=True)
class Skipstone:
    """One of our methods as an engine."""

    method: Method

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self.method)

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> Emitted:
        output = api.generate(model, prompt, self.method, seed=seed, **options)
        assert output.new_tokens is not None
        return Emitted(output.new_tokens[0], output.stats)


@dataclass(frozen=True)
class Row:
    """One row of the table. temperature 0 is greedy; otherwise plain sampling at that temperature."""

    name: str
    engine: Engine
    temperature: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """One prompt continued by one row. seconds: wall-clock of the whole call, prefill included, device synchronised."""

    row: str
    prompt: int
    tokens: list[int]
    seconds: float
    stats: Stats | None = None


@contextmanager
def neutral_defaults(model: PreTrainedModel, stop_at_eos: bool = False) -> Iterator[None]:
    """The same options for all rows: the model's own generation defaults are out of the way, and put back afterwards.

    stop_at_eos: False ignores the end-of-sequence token in every row, so that all rows emit the same number of tokens.
    """
    own: Any = model.generation_config
    eos = own.eos_token_id if stop_at_eos else None
    model.generation_config = GenerationConfig(
        eos_token_id=eos, pad_token_id=0 if own.pad_token_id is None else own.pad_token_id
    )
    try:
        yield
    finally:
        model.generation_config = own


def options_for(temperature: float, max_new_tokens: int) -> dict[str, Any]:
    """Options of `model.generate`, the same for every engine; sampling is from the whole distribution."""
    if temperature == 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}


def measure(model: PreTrainedModel, row: Row, prompt: Tensor, index: int, max_new_tokens: int, seed: int) -> Measurement:
    """Time one call. prompt: [T] int64. seed: of its random numbers. Torch's generator is left as it was."""
    ids = prompt[None].to(model.device)
    options = {**options_for(row.temperature, max_new_tokens), "attention_mask": torch.ones_like(ids)}
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), warnings.catch_warnings():
        # the warning that speculation does not pay is what the table is there to show
        warnings.simplefilter("ignore", RuntimeWarning)
        torch.manual_seed(seed)
        synchronise(model.device)
        start = time.perf_counter()
        emitted = row.engine.generate(model, ids, options, seed)
        synchronise(model.device)
        seconds = time.perf_counter() - start
    return Measurement(row.name, index, emitted.tokens, seconds, emitted.stats)


def warm_up(model: PreTrainedModel, rows: Sequence[Row], prompt: Tensor, max_new_tokens: int) -> None:
    """Run every row once, untimed: first calls allocate, compile kernels and fill caches."""
    for row in rows:
        measure(model, row, prompt, -1, max_new_tokens, seed=0)


def interleave(
    model: PreTrainedModel,
    rows: Sequence[Row],
    prompts: Sequence[Tensor],
    max_new_tokens: int,
    seed: int,
    done: Callable[[], None] = lambda: None,
) -> list[Measurement]:
    """Measure every row on every prompt: all rows on one prompt, then all on the next, each time starting one row later.

    prompts: [T] int64 each. Row r on prompt i draws from seed + i, the same for all rows. done: called after every measurement.
    """
    measurements = []
    for index, prompt in enumerate(prompts):
        for row in rotated(rows, index):
            measurements.append(measure(model, row, prompt, index, max_new_tokens, seed + index))
            done()
    return measurements


def rotated(rows: Sequence[Row], by: int) -> list[Row]:
    """The rows in order, starting at number `by`."""
    first = by % len(rows)
    return [*rows[first:], *rows[:first]]


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
