"""Times whole calls of generation backends, and passes through layers.

Every backend takes a prompt and transformers' options and returns token ids. These ids are counted; nothing is tokenised again.
"""

import gc
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.decoding.method import Method
from skipstone.decoding.settings import whole_number
from skipstone.decoding.stats import Stats
from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.hf import api
from skipstone.models.device_map import input_device
from skipstone.models.passes import Pass, SkipSet

WARM_UP_TOKENS = 16  # new tokens of an untimed call
MAX_SCRATCH_SLOTS = 64  # slots that drafts, trees and replays use in addition to a text's own
REPEATS = 7  # times of a pass; the median counts
COUNTS = ("num_assistant_tokens", "prompt_lookup_num_tokens", "num_draft_tokens")
"""Settings of other implementations that are whole numbers from 1."""
LENGTHS = (1, 2, 3, 4, 6, 8, 12)  # draft lengths of the timed scoring passes


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class GeneratedOutput:
    """The result of one call. Times are of `time.perf_counter`."""

    tokens: list[int]  # the new ids, without the prompt
    stats: Stats | None = None  # of our own methods
    first_at: float | None = None  # time of the first new token; None if unknown
    setup_seconds: float = 0.0  # of set-up work
    ended_at: float | None = None  # time of the last token; None if nothing was done after it


@dataclass(frozen=True)
class GenerationBackend:
    """Something that decodes. The fields of subclasses are what can be set."""

    name: ClassVar[str]
    sampled: ClassVar[bool] = True  # it can sample
    long_warm_up: ClassVar[bool] = False  # warm it up with as many tokens as the task has
    needs_transformers: ClassVar[bool] = False  # it decodes with transformers' own forward
    elsewhere: ClassVar[bool] = False  # it runs in another process, whose memory is not counted

    @property
    def lossless(self) -> bool:
        """Whether its text is the model's own."""
        return True

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def check(self, model: PreTrainedModel) -> None:
        """ValueError for settings that are impossible, or do not fit the model."""
        for name, value in self.settings.items():
            if name in COUNTS:
                whole_number(f"{self.name}: {name}", value, 1)
            if name == "confidence_threshold":
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                if not number or not 0 <= value <= 1:
                    raise ValueError(f"{self.name}: {name} must be a number in [0, 1], found {value!r}")

    def refusal(self, model: PreTrainedModel) -> str | None:
        """The reason why this model cannot be decoded so, or None."""
        return None

    def known(self, model: PreTrainedModel) -> dict[str, Any] | None:
        """What it has learnt about a model, or None."""
        return None

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> GeneratedOutput:
        """Continue a prompt [1, T] under options of `model.generate`. seed: for engines with random numbers of their own;
        torch's generator is seeded by the caller."""
        raise NotImplementedError


@dataclass(frozen=True)
class MethodBackend(GenerationBackend):
    """One of our methods as a backend."""

    method: Method

    @property
    def lossless(self) -> bool:
        return self.method.lossless

    @property
    def settings(self) -> dict[str, Any]:
        return self.method.settings

    def check(self, model: PreTrainedModel) -> None:
        self.method.check(ModelRunner(model))

    def known(self, model: PreTrainedModel) -> dict[str, Any] | None:
        return self.method.report(model) or None

    def generate(self, model: PreTrainedModel, prompt: Tensor, options: dict[str, Any], seed: int) -> GeneratedOutput:
        stats, tokens, first_at = Stats(), [], None
        for step in api.stream(model, prompt, self.method, seed=seed, **options):
            stats.add(step)
            tokens += step.tokens[0]
            if first_at is None and tokens:
                first_at = time.perf_counter()
        return GeneratedOutput(tokens, stats, first_at, stats.seconds_setup)


@dataclass(frozen=True, kw_only=True)
class Measurement(GeneratedOutput):
    """One prompt continued by one backend. Times are seconds of wall-clock, with a synchronised device."""

    seconds: float  # of the whole call, prefill included
    first_seconds: float | None = None  # to the first token
    memory: int | None = None  # peak bytes of the process (on a GPU: of the device); None if another process decoded
    known: dict[str, Any] | None = None  # the method's report of what it has learnt about the model
    grown: dict[str, Any] | None = None  # growth of the counts in that report during this call


def growth(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """The differences of all counts (whole numbers at any depth, and entries named sum). New ones began at 0."""
    found: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, Mapping):
            found[name] = growth(before.get(name) or {}, value)
        elif type(value) is int or name == "sum":
            found[name] = value - (before.get(name) or 0)
    return found


def options_for(max_new_tokens: int, temperature: float = 0.0, top_p: float = 1.0) -> dict[str, Any]:
    """Options of `model.generate`, the same for every backend. Only top_p cuts the distribution. temperature: 0 is greedy."""
    if temperature == 0:
        return {"max_new_tokens": max_new_tokens, "do_sample": False}
    return {"max_new_tokens": max_new_tokens, "do_sample": True, "temperature": temperature, "top_k": 0, "top_p": top_p}


Options = Mapping[str, Any]  # of `model.generate`


def measure(model: PreTrainedModel, engine: GenerationBackend, prompt: Tensor, options: Options, seed: int) -> Measurement:
    """Times one call. prompt: [T] int64. options: of `model.generate`. seed: of its random numbers; torch's generator keeps its
    state."""
    ids = prompt[None].to(input_device(model))  # [1, T]
    cuda = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that drafting does not pay is visible in the table
        torch.manual_seed(seed)
        before = engine.known(model)
        counted = not engine.elsewhere and _forget_peak(model.device)
        synchronise(model.device)
        began = time.perf_counter()
        emitted = engine.generate(model, ids, {**options, "attention_mask": torch.ones_like(ids)}, seed)
        synchronise(model.device)
        seconds = (time.perf_counter() if emitted.ended_at is None else emitted.ended_at) - began
    known = engine.known(model)
    return Measurement(
        **vars(emitted),
        seconds=seconds,
        first_seconds=None if emitted.first_at is None else emitted.first_at - began,
        memory=_peak(model.device) if counted else None,
        known=known,
        grown=growth(before or {}, known) if known else None,
    )


def warm_up(model: PreTrainedModel, engines: Iterable[GenerationBackend], prompt: Tensor, options: Mapping[str, Any]) -> None:
    """Runs every backend once, untimed: first calls allocate, compile kernels and fill caches.

    options: of the later calls. A few tokens suffice, unless shapes depend on their number (`long_warm_up`). An engine that
    compiles layers compiles all graphs of one row of the model, not of a draft model. All present objects are frozen, since a
    garbage collection over them takes as long as a hundred short steps.
    """
    engines = list(engines)
    few = {**options, "max_new_tokens": min(WARM_UP_TOKENS, options["max_new_tokens"])}
    if any(isinstance(engine, MethodBackend) for engine in engines):
        runner = ModelRunner(model)
        slots = len(prompt) + options["max_new_tokens"] + MAX_SCRATCH_SLOTS
        runner.engine.warm_up(1, slots, kv_dtype=runner.kv_dtype)
    for engine in engines:
        measure(model, engine, prompt, options if engine.long_warm_up else few, seed=0)
    gc.collect()
    gc.freeze()


def _forget_peak(device: torch.device) -> bool:
    """Resets the memory peak. False if the system cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak of the resident set
        return True
    return False


def _peak(device: torch.device) -> int | None:
    """The memory peak in bytes since the reset: of torch's allocator on a GPU, of the process's resident set on a CPU (Linux).
    None if the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None


def timings(work: Callable[[], Any], device: torch.device, repeats: int = REPEATS) -> list[float]:
    """Seconds of each run, after one that is not counted."""
    times = []
    for _ in range(repeats + 1):
        synchronise(device)
        began = time.perf_counter()
        work()
        synchronise(device)
        times.append(time.perf_counter() - began)
    return times[1:]


def store_for(runner: ModelRunner, tokens: int) -> KVCache:
    """An empty KV cache of one row for so many tokens."""
    store = KVCache(1, runner.depth, tokens, runner.kv_dtype)
    store.reserve(tokens)
    return store


def one_row(begin: int, width: int, device: torch.device) -> Pass:
    """A pass of one row over `width` tokens behind `begin` others."""
    places = torch.arange(begin, begin + width, device=device, dtype=torch.int64)[None]  # [1, width]
    return Pass(places, places, None, slice(0, 1), begin + width, begin)


def run_tokens(runner: ModelRunner, store: KVCache, ids: Tensor, begin: int, skip: SkipSet | None = None) -> Tensor:
    """Runs ids [1, n] through all layers behind the first `begin` tokens of a KV cache of one row, and stores their keys and
    values. Returns [1, n, d]. skip: sublayers to leave out."""
    at = one_row(begin, ids.shape[1], runner.device)
    return runner.run(runner.embed(ids, at.positions), at, store, range(runner.depth), skip)


@dataclass(frozen=True)
class PassTimes:
    """Seconds of passes at batch 1."""

    layers: list[float]  # of each layer, for one token
    head: float  # norm and LM head
    rows: dict[int, float]  # draft length d -> a pass of d + 1 tokens through all layers

    @property
    def plain(self) -> float:
        """One step of plain decoding."""
        return sum(self.layers) + self.head


@torch.inference_mode()
def measure_passes(runner: ModelRunner, length: int) -> PassTimes:
    """Times every layer for one token, the head, and whole passes over drafts, behind `length` arbitrary tokens.

    ValueError for a model with too few positions for the longest draft.
    """
    widest, whole = max(LENGTHS) + 1, range(runner.depth)
    length = min(length, runner.max_positions - widest)
    if length < 0:
        raise ValueError(f"the model has {runner.max_positions} positions, too few to time drafts of {max(LENGTHS)} tokens")
    store = store_for(runner, length + widest)
    if runner.family.recurrent and length:  # keys and values need not be there, but a state must
        run_tokens(runner, store, torch.zeros((1, length), dtype=torch.long, device=runner.device), 0)
        store.length = [length]

    def run(width: int = 1, layers: range = whole) -> Callable[[], Tensor]:
        """A pass over `width` different tokens through some layers, without the head."""
        at = one_row(length, width, runner.device)
        hidden = runner.embed(at.positions % runner.embeddings, at.positions)  # [1, width, d]
        return lambda: runner.run(hidden, at, store, layers)

    def seconds(work: Callable[[], Any]) -> float:
        return median(timings(work, runner.device))

    layers = [seconds(run(layers=range(layer, layer + 1))) for layer in whole]
    share = seconds(run()) / sum(layers)  # a single layer finds its weights in the processor's cache
    state = run()()  # [1, 1, d]
    rows = {drafts: seconds(run(drafts + 1)) for drafts in LENGTHS}
    return PassTimes([one * share for one in layers], seconds(lambda: runner.logits(state)), rows)
