"""One timed call, and the order of all of them.

Every row of the benchmark is an engine behind the same two lines: a prompt and transformers' options in, emitted ids out. The
tokens counted are those ids; nothing is tokenised again. Rows take turns prompt by prompt in rotating order, so that a machine
that slows down slows all of them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from skipstone import api
from skipstone.decoding.method import Method
from skipstone.decoding.stats import Stats
from skipstone.timing import memory

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Emitted:
    """What one call gave: the new ids, without the prompt, and our own figures where the engine is ours. first: when the first
    new token was there, by `time.perf_counter`; None where nobody looked. setup: seconds before the first pass."""

    tokens: list[int]
    stats: Stats | None = None
    first: float | None = None
    setup: float = 0.0


class Engine(Protocol):
    """Something that decodes. settings: what to print of it. lossless: its text is the model's own."""

    @property
    def settings(self) -> dict[str, Any]: ...

    @property
    def lossless(self) -> bool: ...

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
        return self.method.settings

    @property
    def lossless(self) -> bool:
        return self.method.lossless

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> Emitted:
        stats, tokens, first = Stats(), [], None
        started = time.perf_counter()
        steps = api.stream(model, prompt, self.method, seed=seed, **options)
        setup = time.perf_counter() - started
        for step in steps:
            stats.add(step)
            tokens += step.tokens[0]
            if first is None and tokens:
                first = time.perf_counter()
        return Emitted(tokens, stats, first, setup)


@dataclass(frozen=True)
class Row:
    """One row of the table. temperature 0 is greedy; otherwise plain sampling at that temperature."""

    name: str
    engine: Engine
    temperature: float = 0.0


@dataclass(frozen=True)
class Measurement:
    """One prompt continued by one row. seconds: wall-clock of the whole call, prefill included, device synchronised. first:
    seconds to the first token. memory: most bytes that the process (on a GPU: the device) held during the call. setup: seconds
    that the call was checked and prepared for. known: what a method has learnt about the model so far; grown: what this call
    added to its counts."""

    row: str
    prompt: int
    tokens: list[int]
    seconds: float
    stats: Stats | None = None
    first: float | None = None
    memory: int | None = None
    setup: float = 0.0
    known: dict[str, Any] | None = None
    grown: dict[str, Any] | None = None


def growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """What was added to counts, whole numbers at any depth, and to what is called a sum; others are left out, and what is new
    began at 0."""
    found: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            found[name] = growth(before.get(name) or {}, value)
        elif type(value) is int or name == "sum":
            found[name] = value - (before.get(name) or 0)
    return found


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


def options_for(temperature: float, max_new_tokens: int, top_p: float = 1.0) -> dict[str, Any]:
    """Options of `model.generate`, the same for every engine; nothing but top_p cuts the distribution."""
    if temperature == 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}


def measure(
    model: PreTrainedModel, row: Row, prompt: Tensor, index: int, max_new_tokens: int, seed: int, top_p: float = 1.0
) -> Measurement:
    """Time one call. prompt: [T] int64. seed: of its random numbers. Torch's generator is left as it was."""
    ids = prompt[None].to(model.device)
    options = {**options_for(row.temperature, max_new_tokens, top_p), "attention_mask": torch.ones_like(ids)}
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), warnings.catch_warnings():
        # the warning that speculation does not pay is what the table is there to show
        warnings.simplefilter("ignore", RuntimeWarning)
        torch.manual_seed(seed)
        before = _known(row, model)
        counted = memory.reset(model.device)
        synchronise(model.device)
        start = time.perf_counter()
        emitted = row.engine.generate(model, ids, options, seed)
        synchronise(model.device)
        seconds = time.perf_counter() - start
    first = None if emitted.first is None else emitted.first - start
    most = memory.peak(model.device) if counted else None
    known = _known(row, model)
    grown = growth(before or {}, known) if known else None
    return Measurement(row.name, index, emitted.tokens, seconds, emitted.stats, first, most, emitted.setup, known, grown)


def _known(row: Row, model: PreTrainedModel) -> dict[str, Any] | None:
    return (row.engine.method.report(model) or None) if isinstance(row.engine, Skipstone) else None


def warm_up(model: PreTrainedModel, rows: Sequence[Row], prompt: Tensor, max_new_tokens: int) -> None:
    """Run every row once, untimed: first calls allocate, compile kernels and fill caches. max_new_tokens: of the calls to come;
    few do, but for engines whose shapes depend on it."""
    for row in rows:
        whole = getattr(row.engine, "long_warm_up", False)
        measure(model, row, prompt, -1, max_new_tokens if whole else min(WARM_UP_TOKENS, max_new_tokens), seed=0)


def rotated(rows: Sequence[Row], by: int) -> list[Row]:
    """The rows in order, starting at number `by`."""
    first = by % len(rows)
    return [*rows[first:], *rows[:first]]


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
