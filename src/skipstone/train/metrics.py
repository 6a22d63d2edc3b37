"""What a run leaves behind of itself: metrics as JSON lines, and curves as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class JsonLog(TrainerCallback):
    """Appends every log entry to a file as one JSON line. After a resume the lines beyond the checkpoint are dropped, so that
    the file reads as if nothing had happened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            kept = [line for line in entries(self.path) if line["step"] <= state.global_step] if state.global_step else []
            self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: Any = None, **_: Any) -> None:
        if state.is_world_process_zero and logs:
            with self.path.open("a") as file:
                file.write(json.dumps({"step": state.global_step, **logs}) + "\n")


def entries(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics file; a last line that was cut off while being written is left out."""
    if not path.exists():
        return []
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


class Curves(TrainerCallback):
    """Draws loss, and perplexity and agreement per exit, at every evaluation. Does nothing without matplotlib."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        if state.is_world_process_zero:
            draw(state.log_history, self.path)


def draw(history: list[dict[str, Any]], path: Path) -> bool:
    """The curves of a log, as a PNG. Returns whether they could be drawn: matplotlib is in the extras `train` and `bench`."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(12, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(1, 3)
    for name in ("loss", "loss_last_layer", "divergence"):
        _line(axes[0], history, name, name)
    names = sorted({name for entry in history for name in entry if "_exit_" in name}, key=_by_exit)
    for axis, kind in zip(axes[1:], ("perplexity_exit", "agreement_exit"), strict=True):
        for name in (name for name in names if kind in name):
            _line(axis, history, name, name.removeprefix("eval_").replace(f"{kind}_", "E="))
    for axis, title in zip(axes, ("training loss", "held-out perplexity", "agreement with the last layer"), strict=True):
        axis.set_title(title)
        axis.set_xlabel("step")
        if axis.lines:
            axis.legend(fontsize="x-small")
    axes[1].set_yscale("log")
    figure.savefig(path, dpi=100)
    return True


def _by_exit(name: str) -> tuple[str, int]:
    kind, _, layer = name.rpartition("_")
    return kind, int(layer)


def _line(axis: Any, history: list[dict[str, Any]], name: str, label: str) -> None:
    points = [(entry["step"], entry[name]) for entry in history if name in entry]
    if points:
        axis.plot(*zip(*points, strict=True), label=label)
