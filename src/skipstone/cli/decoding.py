"""A prompt decoded once, timed, with every token's origin: what `generate` shows and `--compare` counts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import skipstone
from skipstone.decoding.method import Method
from skipstone.decoding.stats import Stats
from skipstone.decoding.step import Step


@dataclass(frozen=True)
class Job:
    """What is decoded. ids: [1, T] int64. options: `GenerationConfig` fields. seed: the same for every run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ids: Tensor
    options: dict[str, Any]
    seed: int

    @property
    def sampled(self) -> bool:
        return bool(self.options["do_sample"])

    def steps(self, method: Method) -> Iterator[Step]:
        return skipstone.stream(self.model, self.ids, method, tokenizer=self.tokenizer, seed=self.seed, **self.options)

    def text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))


@dataclass
class Run:
    """One decoding of a job. seconds: wall-clock from the call to the last token, the time spent on showing text left out."""

    tokens: list[int] = field(default_factory=list)
    origin: list[str] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    interrupted: bool = False


def decode(job: Job, method: Method, show: Callable[[Step], None] | None = None) -> Run:
    """Decode a job to its end, or to Ctrl-C, which ends the run and keeps what there is. show: called with every step."""
    run = Run()
    try:
        started = time.perf_counter()
        steps = job.steps(method)
        while True:
            step = next(steps, None)
            run.seconds += time.perf_counter() - started
            if step is None:
                return run
            run.tokens += step.tokens[0]
            run.origin += step.origin[0]
            run.stats.add(step)
            if show is not None:
                show(step)
            started = time.perf_counter()
    except KeyboardInterrupt:
        run.interrupted = True
        return run


def warm_up(job: Job, method: Method, steps: int = 3) -> None:
    """The first steps of a run, thrown away: lazy set-up is paid here and not by whoever is timed first."""
    begun = job.steps(method)
    for _ in range(steps):
        next(begun, None)


def finish_reason(run: Run, job: Job) -> str:
    """Why a run ended: "interrupted", "eos", "stop" (a stop string) or "length"."""
    if run.interrupted:
        return "interrupted"
    ends = job.model.generation_config.eos_token_id  # type: ignore[union-attr]
    if run.tokens and run.tokens[-1] in (ends if isinstance(ends, list) else [ends]):
        return "eos"
    stops = job.options.get("stop_strings") or []
    if len(run.tokens) < job.options["max_new_tokens"] or any(stop in job.text(run.tokens) for stop in stops):
        return "stop"
    return "length"


def dtype_name(model: PreTrainedModel) -> str:
    """The dtype of the weights as the command line spells it: "float32"."""
    return str(model.dtype).removeprefix("torch.")
