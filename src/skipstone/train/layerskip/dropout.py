"""Layer dropout per sample (arXiv 2404.16710, section 4.1.1): a layer's dropped rows leave its batch and are not computed.

The dropped rows are a pure function of (seed, step, layer), the same on every rank. So a checkpoint needs no state for them,
and all ranks of a data-parallel run drop equally many rows.

The layout that a run started with (rows, passes, processes) decides which rows its layers drop. If it resumes on another one,
the same rows of a step drop the same layers, so that the result does not change.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from skipstone.decoding.noise import uniform

_STREAM = 3  # noise stream of layer dropout; decoding does not use it

Forward = Callable[..., Any]
Draw = Callable[[int, int], list[list[int]]]
"""(rows of a forward pass, number of the pass within the run) -> the rows that every layer keeps."""


def kept_rows(rows: int, rates: Sequence[float], seed: int, step: int) -> list[list[int]]:
    """The rows that every layer keeps. rates: dropout rate per layer. step: counts forward passes, not optimiser steps."""
    layers = len(rates)
    place = torch.arange(layers) + step * layers
    draws = uniform(torch.full((layers,), seed), place, _STREAM, rows).tolist()
    return [[row for row in range(rows) if own[row] >= rate] for own, rate in zip(draws, rates, strict=True)]


def run_rows(forward: Forward, rows: list[int], hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Run a layer over some rows of a batch; the others skip it. hidden: [B, T, d], or [k, B, T, d] with k streams. Arguments
    with one entry per row are cut in the same way.

    Eq. 1 with M drawn per row, without rescaling by 1 / (1 - p), as in the paper. Returns the layer's output, or a tuple that
    begins with it and continues with values of the kept rows. Without rows: `hidden` itself.
    """
    batch = hidden.shape[-3]
    if len(rows) == batch:
        return forward(hidden, *args, **kwargs)
    if not rows:
        return hidden
    index = torch.tensor(rows, device=hidden.device)
    args = tuple(_cut(value, index, batch) for value in args)
    kwargs = {name: _cut(value, index, batch) for name, value in kwargs.items()}
    output = forward(hidden.index_select(-3, index), *args, **kwargs)
    kept = output[0] if isinstance(output, tuple) else output
    merged = hidden.index_copy(-3, index, kept.to(hidden.dtype))
    return (merged, *output[1:]) if isinstance(output, tuple) else merged


def _cut(value: Any, index: Tensor, batch: int) -> Any:
    if isinstance(value, Tensor) and value.ndim > 1 and value.shape[0] == batch:
        return value[index]
    if isinstance(value, tuple):
        return tuple(_cut(part, index, batch) for part in value)
    return value


@contextmanager
def forwards_replaced(modules: Sequence[nn.Module], wrap: Callable[[int, Forward], Forward]) -> Iterator[None]:
    """Let module i run wrap(i, its own forward) until the block ends, then restore its forward."""
    before = [module.__dict__.get("forward") for module in modules]
    for index, module in enumerate(modules):
        module.forward = wrap(index, module.forward)
    try:
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own


@contextmanager
def layers_recorded(
    layers: Sequence[nn.Module], wanted: Sequence[bool], rows: Sequence[list[int]], joining: Sequence[bool] | None = None
) -> Iterator[dict[int, Tensor]]:
    """Run each layer over its rows only, and record the outputs x_{l+1} [B, T, d] ([k, B, T, d] with k streams) of the wanted
    layers by l.

    Layer 0 must keep a row: it shows whether this family's layers return tuples, before a layer drops all rows. joining: layers
    that need a gradient, 0 if they keep no row here, because another process keeps one and gradients are summed.
    """
    states: dict[int, Tensor] = {}
    tuples = False

    def wrap(layer: int, forward: Forward) -> Forward:
        def run(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal tuples
            if joining is not None and joining[layer] and not rows[layer]:
                hidden = hidden + sum(0 * parameter.sum() for parameter in layers[layer].parameters())
            elif not rows[layer]:
                hidden = hidden.clone()  # FSDP passes a view and must not get one back
            output = run_rows(forward, rows[layer], hidden, *args, **kwargs)
            if rows[layer]:
                tuples = isinstance(output, tuple)
            elif tuples:
                output = (output,)
            if wanted[layer]:
                states[layer] = output[0] if isinstance(output, tuple) else output
            return output

        return run

    with forwards_replaced(layers, wrap):
        yield states


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
    drawn = cache(lambda at: draw(started.rows, at))

    def kept_by(other: int) -> list[list[int]]:
        places = [started.place(step, now.row(number, other) + row) for row in range(rows)]
        layers = range(len(drawn(places[0][0])))
        return [[row for row, (at, own) in enumerate(places) if own in drawn(at)[layer]] for layer in layers]

    everywhere = [kept_by(other) for other in range(now.processes)]
    return everywhere[process], [any(layers) for layers in zip(*everywhere, strict=True)]
