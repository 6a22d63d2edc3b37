"""A whole benchmark: a model and its prompts, tuned settings, an interleaved run, one document."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import PreTrainedModel

from skipstone.bench import machine, prompts, surrogate, tuning
from skipstone.bench.measure import Engine, Row, Skipstone, interleave, neutral_defaults, warm_up
from skipstone.bench.peers import HFGenerate, early_exit_refusal
from skipstone.bench.prompts import Prompt
from skipstone.bench.report import EARLY_EXIT, OURS, THEIRS, Results, named
from skipstone.core.model import LayeredModel
from skipstone.loading import load
from skipstone.methods.autoregressive import Autoregressive

LAYERSKIP, LOOKUP = "layerskip", "hf-prompt-lookup"
ROWS = (THEIRS, EARLY_EXIT, LOOKUP, OURS, LAYERSKIP)
SAMPLED = (THEIRS, OURS, LAYERSKIP)  # rows that are measured at a temperature too
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WARM_UP_TOKENS = 16

Step = Callable[[], None]


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on besides the machine; the defaults of the command."""

    model: str | None = None
    surrogate: str | None = None
    prompts: str | None = None
    num_prompts: int = 20
    tune_prompts: int = 6
    prompt_tokens: int = 128
    max_new_tokens: int = 96
    tune_tokens: int = 48
    temperature: float = 0.8
    rows: tuple[str, ...] = ROWS
    exit_layers: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = tuning.LENGTHS
    thresholds: tuple[float | None, ...] = tuning.THRESHOLDS
    peer_thresholds: tuple[float, ...] = tuning.PEER_THRESHOLDS
    stop_at_eos: bool = False
    dtype: str = "float32"
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self._check_grid()
        if self.model is not None and self.surrogate is not None:
            raise ValueError("give either a model (a folder or hub id) or --surrogate")
        if self.surrogate is not None and self.prompts is not None:
            raise ValueError("a surrogate has no vocabulary of words: its prompts are sampled ids, --prompts cannot be used")
        for name in ("num_prompts", "tune_prompts", "prompt_tokens", "max_new_tokens", "tune_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, found {getattr(self, name)}")
        if self.temperature < 0:
            raise ValueError(f"temperature must not be negative (0: no sampled rows), found {self.temperature}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, found {self.dtype!r}")
        if unknown := [row for row in self.rows if row not in ROWS]:
            raise ValueError(f"unknown row {unknown[0]!r}; there are {', '.join(ROWS)}")

    def _check_grid(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads must be at least 1, found {self.threads}")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be draft lengths of at least 1, found {self.lengths}")
        for name in ("thresholds", "peer_thresholds"):
            if wrong := [one for one in getattr(self, name) if one is not None and not 0 <= one <= 1]:
                raise ValueError(f"{name} must lie between 0 and 1, found {wrong[0]}")


@dataclass
class Subject:
    """What is measured: a model with the prompts to tune and the prompts to report. They share none."""

    model: PreTrainedModel
    name: str
    tune: list[Prompt]
    report: list[Prompt]
    surrogate: dict[str, Any] | None = None


@dataclass
class Choice:
    """The engines that take part, how their settings were found, and which rows there are none of."""

    engines: dict[str, Engine] = field(default_factory=dict)
    tuning: dict[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def run(settings: Settings, argv: list[str]) -> dict[str, Any]:
    """Run a benchmark. Returns the document: plain JSON values only."""
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    origin = machine.provenance(argv, settings.seed)
    subject = prepare(settings)
    model = subject.model
    check_length(model, subject.tune + subject.report, settings.max_new_tokens)
    mean_length = subject.report[0].ids.shape[0] + settings.max_new_tokens / 2
    ceiling = machine.ceiling(model, mean_length)
    with neutral_defaults(model, settings.stop_at_eos):
        choice = choose(settings, model, [prompt.ids for prompt in subject.tune])
        rows = table_rows(settings, choice.engines)
        ids = [prompt.ids for prompt in subject.report]
        warm_up(model, rows, subject.tune[0].ids, min(WARM_UP_TOKENS, settings.max_new_tokens))
        with progress("measuring", len(rows) * len(ids)) as done:
            measurements = interleave(model, rows, ids, settings.max_new_tokens, settings.seed, done)
    results = Results(rows, subject.report, measurements, settings.seed)
    document = {
        "kind": "skipstone-bench",
        "synthetic": subject.surrogate is not None,
        "model": {"name": subject.name, "type": model.config.model_type, "layers": model.config.num_hidden_layers},
        "settings": asdict(settings),
        "provenance": origin,
        "ceiling": ceiling,
        "surrogate": subject.surrogate,
        "tuning": choice.tuning,
        "tuning_prompts": [{"source": prompt.source, "digest": prompt.digest} for prompt in subject.tune],
        "refused": choice.refused,
        "rows": results.per_row(),
        "prompts": results.per_prompt(),
    }
    return plain(document)


def prepare(settings: Settings) -> Subject:
    """Load or build the model, and take its prompts: the first ones to tune with, the others to report."""
    count, dtype = settings.tune_prompts + settings.num_prompts, DTYPES[settings.dtype]
    if settings.surrogate is None:
        documents = prompts.read(settings.prompts)
        model, tokenizer = load(settings.model, dtype=dtype, device=settings.device)
        chosen = prompts.choose(documents, tokenizer, count, settings.prompt_tokens, settings.seed)
        return _subject(settings, model, settings.model or "skipstone-nano", chosen)
    if settings.surrogate == surrogate.NAMED:
        model = surrogate.llama_1b(settings.seed, dtype, settings.device)
        chosen = surrogate.random_prompts(model.config.vocab_size, count, settings.prompt_tokens, settings.seed)
        about = {"synthetic": True, "shape": surrogate.NAMED, "contexts": "random ids"}
        return _subject(settings, model, f"surrogate {surrogate.NAMED}", chosen, about)
    made = surrogate.calibrate(surrogate.parse(settings.surrogate), settings.seed, dtype=dtype, device=settings.device)
    chosen = surrogate.sampled_prompts(made.model, count, settings.prompt_tokens, settings.seed + 1)
    return _subject(settings, made.model, f"surrogate {settings.surrogate}", chosen, made.report())


def _subject(
    settings: Settings, model: PreTrainedModel, name: str, chosen: list[Prompt], about: dict[str, Any] | None = None
) -> Subject:
    return Subject(model, name, chosen[: settings.tune_prompts], chosen[settings.tune_prompts :], about)


def check_length(model: PreTrainedModel, chosen: Sequence[Prompt], max_new_tokens: int) -> None:
    """ValueError where a prompt and its continuation exceed the model's positions."""
    layered = LayeredModel(model)
    longest = max(len(prompt.ids) for prompt in chosen)
    if longest + max_new_tokens > layered.max_positions:
        raise ValueError(
            f"a prompt of {longest} tokens + {max_new_tokens} new tokens is more than the model's {layered.max_positions} "
            f"positions ({layered.max_positions_source}): lower --prompt-tokens or --max-new-tokens"
        )


def choose(settings: Settings, model: PreTrainedModel, ids: Sequence[Tensor]) -> Choice:
    """Find each row's settings on the tuning prompts, or the reason why the row cannot be had."""
    grid = _grid(settings, model)
    choice = Choice()
    candidates: dict[str, Callable[[], list[Engine]]] = {
        THEIRS: lambda: [HFGenerate()],
        EARLY_EXIT: grid.early_exit,
        LOOKUP: grid.prompt_lookup,
        OURS: lambda: [Skipstone(Autoregressive())],
        LAYERSKIP: grid.layerskip,
    }
    for name in settings.rows:
        reason = early_exit_refusal(model) if name == EARLY_EXIT else None
        if reason is not None:
            choice.refused[name] = reason
            continue
        engines = candidates[name]()
        calls = tuning.budget(len(engines), len(ids))
        if calls:
            warm_up(model, [Row(name, engines[0])], ids[0], min(WARM_UP_TOKENS, settings.tune_tokens))
        with progress(f"tuning {name}", calls) as done:
            best, trials = tuning.tune(model, engines, ids, settings.tune_tokens, settings.seed, done)
        choice.engines[name] = best
        if calls:
            choice.tuning[name] = {
                "chosen": best.settings,
                "candidates": len(engines),
                "calls": calls,
                "temperature": 0.0,
                "trials": [trial.report() for trial in trials[:20]],
            }
    return choice


def _grid(settings: Settings, model: PreTrainedModel) -> tuning.Grid:
    layers = settings.exit_layers
    if layers is None and settings.surrogate not in (None, surrogate.NAMED):
        layers = _around(surrogate.parse(str(settings.surrogate)))
    depth = model.config.num_hidden_layers
    if wrong := [layer for layer in layers or () if not 1 <= layer < depth]:
        raise ValueError(f"exit layers must lie between 1 and {depth - 1} for a model of {depth} layers, found {wrong[0]}")
    return tuning.Grid(
        layers or tuning.exit_layers(depth),
        settings.lengths,
        settings.thresholds,
        settings.peer_thresholds,
    )


def _around(shape: surrogate.Shape) -> tuple[int, ...]:
    """Exit layers to try on a surrogate: its own and two more on either side."""
    tried = (shape.exit - 2, shape.exit, shape.exit + 2)
    return tuple(layer for layer in tried if 1 <= layer < shape.layers)


def table_rows(settings: Settings, engines: dict[str, Engine]) -> list[Row]:
    """Greedy rows, then the sampled ones with the settings found at greedy decoding."""
    rows = [Row(name, engine) for name, engine in engines.items()]
    if settings.temperature:
        sampled = [(name, engine) for name, engine in engines.items() if name in SAMPLED]
        rows += [Row(named(name, settings.temperature), engine, settings.temperature) for name, engine in sampled]
    return rows


@contextmanager
def progress(title: str, total: int) -> Iterator[Step]:
    """What is being done, on stderr: a bar with the remaining time on a terminal, one line elsewhere.

    total: pieces of work, 0 says nothing. Yields what to call after every piece.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    if total and not console.is_terminal:
        console.print(f"{title}: {total} calls", highlight=False)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal or not total) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def plain(value: Any) -> Any:
    """JSON values only: tuples as lists, and None for what is not a finite number."""
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write(path: Path, document: dict[str, Any]) -> None:
    """Write atomically: a reader finds the whole document or the previous one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def command_line() -> list[str]:
    """The command that was typed, as provenance keeps it."""
    return [Path(sys.argv[0]).name, *sys.argv[1:]]
