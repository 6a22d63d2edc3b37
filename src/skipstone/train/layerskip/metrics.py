"""Measures every exit on held-out text, and reports a run: a progress bar, metrics as JSON lines, and a picture of curves."""

import math
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from skipstone.engines.exit_statistics import ExitTally, watched
from skipstone.models.decoder_model import DecoderModel
from skipstone.train.data.rows import IGNORED, shifted
from skipstone.train.layerskip.objective import CHUNK
from skipstone.utils.files import json_line, write_whole
from skipstone.utils.pictures import image_of, new_figure

EXIT_FIGURE = re.compile(r"eval_(?:(.+)_)?(perplexity|agreement)_exit_(\d+)")
"""A figure of an evaluation: data set, kind, exit layer E."""


def flat(quality: ExitTally) -> dict[str, float]:
    """The figures of all exits, one number per name, for logs. loss: nats a token of the last layer."""
    perplexity, agreement = quality.perplexity(), quality.agreement()
    last = perplexity[max(perplexity)]
    values = {"loss": math.log(last), "perplexity": last}
    for layer in sorted(perplexity):
        values |= {f"perplexity_exit_{layer}": perplexity[layer], f"agreement_exit_{layer}": agreement[layer]}
    return values


@torch.no_grad()
def exit_quality(
    model: PreTrainedModel,
    rows: Any,
    batch_size: int = 8,
    exits: Sequence[int] | None = None,
    chunk: int = CHUNK,
    collate: Callable[[list[Any]], dict[str, Tensor]] | None = None,
    modules: DecoderModel | None = None,
) -> ExitTally:
    """Measure exits on a data set of items {input_ids [T], labels [T]}, all of one length, with attention_mask [T] if rows are
    padded. Sums are float64.

    exits: layers E in 1..L, None for all; L is always included. chunk: positions whose logits exist at once. collate: makes a
    batch of items; torch's function by default. modules: the parts of a model, needed if FSDP changed its class. The model
    keeps its mode. ValueError for exits that do not exist, and for rows that predict nothing.
    """
    modules, training = modules or DecoderModel(model), model.training
    tally = ExitTally(modules, range(1, modules.depth + 1) if exits is None else exits)
    if wrong := [layer for layer in tally.exits if not 1 <= layer <= modules.depth]:
        raise ValueError(f"exits must lie between 1 and {modules.depth}, found {wrong}")
    model.eval()
    try:
        for batch in DataLoader(rows, batch_size=batch_size, collate_fn=collate):
            ids, targets = batch["input_ids"].to(model.device), shifted(batch["labels"]).flatten().to(model.device)
            mask = batch["attention_mask"].to(model.device) if "attention_mask" in batch else None
            with watched(modules, tally.exits) as found:
                modules.decoder(input_ids=ids, attention_mask=mask, use_cache=False)
            predicting = targets != IGNORED
            states = {layer: state.flatten(0, 1)[predicting] for layer, state in found.items()}  # [N, d] each
            targets = targets[predicting]
            for first in range(0, len(targets), chunk):
                part = slice(first, first + chunk)
                tally.add({layer: state[part] for layer, state in states.items()}, targets[part])
    finally:
        model.train(training)
    if not tally.tokens:
        raise ValueError("there is nothing to measure: no position of the rows predicts anything")
    return tally


class JsonLog(TrainerCallback):
    """Appends every log entry to a file as one JSON line. When a run starts or resumes, the file is rewritten from the
    checkpoint's history, so that an interruption leaves no trace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            write_whole(self.path, "".join(json_line({"step": entry["step"], **entry}) for entry in state.log_history))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json_line({"step": state.global_step, **logs}))


class ProgressBar(TrainerCallback):
    """A bar on stderr with the loss and the remaining time, and a line for every evaluation."""

    bar: Any = None

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            seconds = 0.1 if sys.stderr.isatty() else 10  # few bars in a file
            self.bar = tqdm(  # `initial`: steps of an earlier process do not count for the speed
                total=state.max_steps, initial=state.global_step, unit="step", file=sys.stderr, mininterval=seconds
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        if self.bar is not None and logs and "loss" in logs:
            self.bar.set_postfix(loss=f"{logs['loss']:.3f}", refresh=False)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any) -> None:
        if state.is_world_process_zero:
            for line in summary(more.get("metrics") or {}):
                tqdm.write(f"step {state.global_step}: {line}", file=sys.stderr)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Close the bar, also after an error, so that the next output begins a line."""
        if self.bar is not None:
            self.bar.close()
            self.bar = None


def summary(metrics: dict[str, float]) -> list[str]:
    """An evaluation for people, one line per data set: perplexity, and each exit's agreement with the last layer."""
    lines: dict[str, list[str]] = {}
    for name, value in metrics.items():
        if name.endswith("_perplexity"):
            source = name.removeprefix("eval").removesuffix("_perplexity").lstrip("_")
            lines[source] = [f"{source or 'held-out'}: perplexity {value:.2f}, agreement"]
        elif (parts := EXIT_FIGURE.fullmatch(name)) and parts[2] == "agreement" and (parts[1] or "") in lines:
            lines[parts[1] or ""].append(f"E={parts[3]} {value:.2f}")
    return [" ".join(line) for line in lines.values()]


class CurvePlot(TrainerCallback):
    """Draws loss, and perplexity and agreement per exit, at every evaluation."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            draw(state.log_history, self.path)


def draw(history: list[dict[str, Any]], path: Path) -> None:
    """Write the curves of a log as a PNG. Without matplotlib: a warning."""
    try:
        write_whole(path, image_of(curves(history)))
    except ImportError:
        warnings.warn(f'{path} is not drawn without matplotlib: pip install "skipstone[train]"', stacklevel=2)


def curves(history: list[dict[str, Any]]) -> Any:
    """A matplotlib figure: loss and its parts; per exit (colour) and data set (dashes) perplexity, and agreement."""
    from matplotlib import colormaps

    figure, axes = new_figure((15, 5), columns=3)
    for name in ("loss", "loss_last_layer", "divergence"):
        _line(axes[0], history, name, label=name)
    matches = [match for entry in history for name in entry if (match := EXIT_FIGURE.fullmatch(name))]
    sources, layers = sorted({match[1] or "" for match in matches}), sorted({int(match[3]) for match in matches})
    for source, layer in product(sources, layers):
        shade = layers.index(layer) / max(1, len(layers) - 1) * 0.9
        style = {"color": colormaps["viridis"](shade), "linestyle": ("-", "--", ":", "-.")[sources.index(source) % 4]}
        for axis, kind in zip(axes[1:], ("perplexity", "agreement"), strict=True):
            name = f"eval_{source}_{kind}_exit_{layer}" if source else f"eval_{kind}_exit_{layer}"
            _line(axis, history, name, label=f"{source} E={layer}".strip(), **style)
    for axis, title in zip(axes, ("training loss", "held-out perplexity", "agreement with the last layer"), strict=True):
        axis.set(title=title, xlabel="step")
        if axis.lines:
            axis.legend(fontsize="xx-small", ncols=1 + len(axis.lines) // 16)
    axes[1].set_yscale("log")
    return figure


def _line(axis: Any, history: list[dict[str, Any]], name: str, **style: Any) -> None:
    points = [(entry["step"], entry[name]) for entry in history if name in entry]
    if points:
        axis.plot(*zip(*points, strict=True), marker=".", **style)
