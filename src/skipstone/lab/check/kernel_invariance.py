"""Whether a quantised layer gives a row the same sum alone and beside others, on the inputs that a text brings to it.

Some kernels have another loop for one row than for many, which rounds otherwise. Some choose by all rows of a pass what they
compute in a finer dtype (bitsandbytes' outliers): there a row's sum depends on its neighbours by more than rounding.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skipstone.engines.kv_cache import KVCache
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from skipstone.models.quantised import kernels

ROWS = 32  # tokens of the text whose sums are compared
TOKENS = 96  # tokens of the text whose keys and values are compared: few of them are far apart
WIDTHS = (2, 8, 32)  # rows of a pass that are compared with rows alone


@dataclass
class KernelResult:
    """The layers of one kernel. layers: how many ran. different: how many gave some row another sum. sums: compared. largest:
    the largest difference. share: the largest difference as a share of the layer's largest sum."""

    layers: int = 0
    different: int = 0
    sums: int = 0
    largest: float = 0.0
    share: float = 0.0

    def add(self, alone: Tensor, beside: list[Tensor]) -> None:
        """Sums [1, n, d_out] of one layer."""
        alone, beside = alone.detach(), [one.detach() for one in beside]
        differences = [float((one.float() - alone.float()).abs().nan_to_num(torch.inf).max()) for one in beside]
        most = max(differences)
        self.layers += 1
        self.different += most > 0
        self.sums += len(beside) * alone.numel()
        self.largest = max(self.largest, most)
        self.share = max(self.share, most / max(float(alone.abs().max()), 1e-30))

    def __str__(self) -> str:
        """What was found, in a few words."""
        if not self.different:
            return f"the same sums in all {self.layers} layers"
        apart = f"by up to {self.largest:.2g} ({self.share:.1g} of the largest)"
        return f"other sums in {self.different} of {self.layers} layers, {apart}"


def measured(runner: ModelRunner, text: Tensor) -> dict[str, KernelResult]:
    """Every kernel of a quantised model. text: [T] int64, which is repeated where it is short."""
    ids = _repeated(text, min(ROWS, runner.max_positions)).to(runner.device)
    found: dict[str, KernelResult] = {}
    with _watched(kernels(runner.model), found):
        runner.read(ids[None])
    return found


@torch.inference_mode()
def spread(runner: ModelRunner, text: Tensor, near: Tensor) -> float:
    """How far the logits of some tokens [n] after a text [T] are apart, where it came alone and in passes of several rows."""
    last = torch.stack([_passed(runner, text, width)[0][near] for width in (1, *WIDTHS, len(text))])
    return float((last - last[0]).abs().nan_to_num(torch.inf).max())


@torch.inference_mode()
def stored_spread(runner: ModelRunner, text: Tensor) -> float:
    """The same of stored keys and values, as a share of the largest entry of a layer. text: repeated where it is short."""
    text = _repeated(text, min(TOKENS, runner.max_positions))
    alone, *others = (_passed(runner, text, width)[1] for width in (1, *WIDTHS, len(text)))
    shares = [0.0]
    for other in others:
        for one, expected in zip((*other.keys, *other.values), (*alone.keys, *alone.values), strict=True):
            if one is not None and expected is not None:
                one, expected = (kept[:, :, : len(text)].float() for kept in (one, expected))
                shares.append(float((one - expected).abs().max() / expected.abs().max().clamp_min(1e-30)))
    return max(shares)


def _repeated(text: Tensor, length: int) -> Tensor:
    return text.repeat(-(-length // len(text)))[:length]


def _passed(runner: ModelRunner, text: Tensor, width: int) -> tuple[Tensor, KVCache]:
    """Logits [V] after a text that came in passes of `width` tokens, and its keys and values."""
    store, logits = KVCache(1, runner.depth, len(text)), torch.empty(0, dtype=torch.float32, device="cpu")
    for part in text.to(runner.device).split(width):
        forward = PartialForward(runner, store, part[:1], [True], [len(part) - 1])
        if len(part) > 1:
            forward.append(part[None, 1:])
        store.length[0] += len(part)
        logits = forward.finish()[0, -1]
    return logits, store


@contextmanager
def _watched(layers: dict[str, list[nn.Module]], found: dict[str, KernelResult]) -> Iterator[None]:
    """Run every layer again, row by row, whenever it runs."""
    comparing: list[nn.Module] = []

    def hook(name: str, module: nn.Module, given: tuple[Any, ...]) -> None:
        if comparing:
            return
        comparing.append(module)
        rows: Tensor = given[0]  # [1, n, d_in]
        alone, *beside = (torch.cat([module(part) for part in rows.split(width, 1)], 1) for width in (1, *WIDTHS))
        found.setdefault(name, KernelResult()).add(alone, beside)
        comparing.clear()

    handles = [one.register_forward_pre_hook(partial(hook, name)) for name, modules in layers.items() for one in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
