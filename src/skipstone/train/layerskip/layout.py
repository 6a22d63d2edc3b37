"""The layout of a step's rows over processes and forward passes.

The layout that a run started with decides which rows its layers drop. If it resumes on another one (other processes and
passes), the same rows of a step drop the same layers, so that the result does not change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

Draw = Callable[[int, int], list[list[int]]]
"""(rows of a forward pass, number of the pass within the run) -> the rows that every layer keeps."""


@dataclass(frozen=True)
class BatchLayout:
    """rows: of one process in one forward pass. passes: forward passes per step (gradient accumulation)."""

    rows: int
    passes: int
    processes: int

    @property
    def step_rows(self) -> int:
        """Rows of a step, over all processes and passes."""
        return self.rows * self.passes * self.processes

    def place(self, step: int, row: int) -> tuple[int, int]:
        """(pass within the run, row of its process) of a row of a step. Rows are dealt out process by process, pass by pass."""
        number, within = divmod(row, self.rows * self.processes)
        return step * self.passes + number, within % self.rows

    def row(self, number: int, process: int) -> int:
        """The first row of a step that a process has in its pass of that number."""
        return (number * self.processes + process) * self.rows

    def passes_of(self, other: "BatchLayout") -> int:
        """Passes of this layout's step on another layout's processes and rows. ValueError if that is no whole number."""
        passes, rest = divmod(self.step_rows, other.rows * other.processes)
        if rest:
            raise ValueError(f"{other.processes} processes of {other.rows} rows cannot share {self.step_rows} rows equally")
        return passes


def layout_of(settings: dict[str, Any]) -> BatchLayout:
    """The layout of a run's deciding settings (`LayerSkipArguments.deciding`)."""
    return BatchLayout(settings["per_device_train_batch_size"], settings["gradient_accumulation_steps"], settings["world_size"])


def kept_elsewhere(
    started: BatchLayout, now: BatchLayout, process: int, step: int, number: int, draw: Draw, rows: int
) -> tuple[list[list[int]], list[bool]]:
    """The rows of a forward pass that every layer keeps, in a run that started on another layout.

    process: number of this process. step, number: the optimiser step, and the pass within it. rows: of this pass. Also returns
    for each layer whether any process keeps a row in this pass: then all processes must join in summing gradients.
    """
    drawn: dict[int, list[list[int]]] = {}

    def kept_by(other: int) -> list[list[int]]:
        first = now.row(number, other)
        places = [started.place(step, first + row) for row in range(rows)]
        for at, _ in places:
            drawn.setdefault(at, draw(started.rows, at))
        layers = range(len(drawn[places[0][0]]))
        return [[row for row, (at, own) in enumerate(places) if own in drawn[at][layer]] for layer in layers]

    everywhere = [kept_by(other) for other in range(now.processes)]
    return everywhere[process], _any(everywhere)


def _any(kept: Sequence[list[list[int]]]) -> list[bool]:
    return [any(layers) for layers in zip(*kept, strict=True)]
