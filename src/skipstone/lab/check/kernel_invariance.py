"""Whether a quantised layer gives a row the same sum alone and in a batch, on the inputs of a text.

Some kernels have another loop for one row than for many, and round differently. Some choose by all rows of a pass which inputs
to compute in a finer dtype (bitsandbytes' outliers), so a row's sum depends on its neighbours by more than rounding.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.check.batch_invariance import repeat_text, run_in_passes
from skipstone.models.quantised_checkpoints import kernels

ROWS = 32  # tokens of the text in the comparison of sums
TOKENS = 96  # tokens of the text in the comparison of keys and values; few of them differ much
WIDTHS = (2, 8, 32)  # rows of a pass that are compared with single rows


@dataclass
class KernelResult:
    """The layers of one kernel."""

    layers: int = 0
    different: int = 0  # layers that gave a row another sum in a batch
    sums: int = 0  # compared
    largest: float = 0.0  # difference
    share: float = 0.0  # largest difference as a share of the layer's largest sum

    def add(self, alone: Tensor, batched: list[Tensor]) -> None:
        """Sums [1, n, d_out] of one layer."""
        differences = [float((one.float() - alone.float()).abs().nan_to_num(torch.inf).max()) for one in batched]
        largest = max(differences)
        self.layers += 1
        self.different += largest > 0
        self.sums += len(batched) * alone.numel()
        self.largest = max(self.largest, largest)
        self.share = max(self.share, largest / max(float(alone.abs().max()), 1e-30))

    def __str__(self) -> str:
        if not self.different:
            return f"the same sums in all {self.layers} layers"
        difference = f"by up to {self.largest:.2g} ({self.share:.1g} of the largest)"
        return f"other sums in {self.different} of {self.layers} layers, {difference}"


def compare_kernels(runner: ModelRunner, text: Tensor) -> dict[str, KernelResult]:
    """Name of a quantised kernel -> result. text: [T] int64, repeated if it is short."""
    ids = repeat_text(text, min(ROWS, runner.max_positions)).to(runner.device)
    results: dict[str, KernelResult] = {}
    with _compare_every_layer(kernels(runner.model), results):
        runner.read(ids[None])
    return results


@torch.inference_mode()
def logits_spread(runner: ModelRunner, text: Tensor, tokens: Tensor) -> float:
    """Largest difference between the logits of tokens [n] after a text [T] read token by token and in wider passes."""
    last = torch.stack([_read_in_passes(runner, text, width)[0][tokens] for width in (1, *WIDTHS, len(text))])
    return float((last - last[0]).abs().nan_to_num(torch.inf).max())


@torch.inference_mode()
def kv_spread(runner: ModelRunner, text: Tensor) -> float:
    """The same of stored keys and values, as a share of the largest entry of a layer. text: repeated if it is short."""
    text = repeat_text(text, min(TOKENS, runner.max_positions))
    alone, *others = (_read_in_passes(runner, text, width)[1] for width in (1, *WIDTHS, len(text)))
    shares = [0.0]
    for other in others:
        for one, expected in zip((*other.keys, *other.values), (*alone.keys, *alone.values), strict=True):
            if one is not None and expected is not None:
                one, expected = (entries[:, :, : len(text)].float() for entries in (one, expected))
                shares.append(float((one - expected).abs().max() / expected.abs().max().clamp_min(1e-30)))
    return max(shares)


def _read_in_passes(runner: ModelRunner, text: Tensor, width: int) -> tuple[Tensor, KVCache]:
    """(logits [V] after a text that is read in passes of `width` tokens, its keys and values)."""
    store = KVCache(1, runner.depth, len(text))
    (logits,) = deque(run_in_passes(runner, store, text, width), maxlen=1)
    return logits[-1], store


@contextmanager
def _compare_every_layer(layers: dict[str, list[nn.Module]], results: dict[str, KernelResult]) -> Iterator[None]:
    """Run every layer again in passes of different widths whenever it runs."""
    comparing: list[nn.Module] = []

    @torch.no_grad()
    def hook(name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if comparing:
            return
        comparing.append(module)
        rows: Tensor = inputs[0]  # [1, n, d_in]
        alone, *batched = (torch.cat([module(part) for part in rows.split(width, 1)], 1) for width in (1, *WIDTHS))
        results.setdefault(name, KernelResult()).add(alone, batched)
        comparing.clear()

    with ExitStack() as stack:
        for name, modules in layers.items():
            for module in modules:
                stack.callback(module.register_forward_pre_hook(partial(hook, name)).remove)
        yield
