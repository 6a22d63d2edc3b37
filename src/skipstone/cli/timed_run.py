"""A prompt decoded and timed."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import skipstone
from skipstone.decoding.draft import Step
from skipstone.decoding.method import Method
from skipstone.decoding.stats import Stats
from skipstone.hf.detokenizer import detokenize

Show = Callable[[Step], None] | None
"""Called with every step of a run."""


@dataclass(frozen=True)
class RunInput:
    """A model and a prompt. ids: [1, T] int64. options: keyword arguments of `skipstone.generate`. seed: the same for every
    run."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    ids: Tensor
    options: dict[str, Any]
    seed: int

    @property
    def is_sampled(self) -> bool:
        return bool(self.options["do_sample"])

    @property
    def dtype_name(self) -> str:
        """The dtype of the weights as the command line spells it, such as "float32"."""
        return str(self.model.dtype).removeprefix("torch.")

    def steps(self, method: Method) -> Iterator[Step]:
        """The steps of one decoding."""
        options = {"attention_mask": torch.ones_like(self.ids), **self.options, "num_return_sequences": 1}
        return skipstone.stream(self.model, self.ids, method, tokenizer=self.tokenizer, seed=self.seed, **options)

    def text(self, tokens: list[int]) -> str:
        """The text of new tokens."""
        return detokenize(self.tokenizer, tokens, self.ids[0].tolist())


@dataclass
class Run:
    """One decoding of a prompt. seconds: wall-clock time from the call to the last token, without the time of showing text."""

    tokens: list[int] = field(default_factory=list)
    origin: list[str] = field(default_factory=list)
    stats: Stats = field(default_factory=Stats)
    seconds: float = 0.0
    interrupted: bool = False
    steps: list[Step] = field(default_factory=list)

    def finish_reason(self, job: RunInput) -> str:
        """Why the run ended: "interrupted", "eos", "stop" (a stop string) or "length"."""
        if self.interrupted:
            return "interrupted"
        own: Any = job.model.generation_config
        eos = job.options.get("eos_token_id", own.eos_token_id)
        if self.tokens and self.tokens[-1] in (eos if isinstance(eos, list) else [eos]):
            return "eos"
        stops = job.options.get("stop_strings") or own.stop_strings or []
        stops = [stops] if isinstance(stops, str) else stops
        if len(self.tokens) < job.options["max_new_tokens"] or any(stop in job.text(self.tokens) for stop in stops):
            return "stop"
        return "length"


def decode(job: RunInput, method: Method, show: Show = None) -> Run:
    """Decode a prompt to its end or to Ctrl-C."""
    return collect_run(lambda: job.steps(method), show)


def collect_run(begin: Callable[[], Iterator[Step]], show: Show = None) -> Run:
    """A run of the steps that `begin` starts, to their end or to Ctrl-C, which keeps the tokens so far."""
    run = Run()
    try:
        started = time.perf_counter()
        steps = begin()
        while True:
            step = next(steps, None)
            run.seconds += time.perf_counter() - started
            if step is None:
                return run
            run.tokens += step.tokens[0]
            run.origin += step.origin[0]
            run.stats.add(step)
            run.steps.append(step)
            if show is not None:
                show(step)
            started = time.perf_counter()
    except KeyboardInterrupt:
        run.interrupted = True
        return run
