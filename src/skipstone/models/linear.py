"""Linear layers over a few rows in float32 on the CPU, in the place of nn.Linear's forward while skipstone runs a model.

There `F.linear` reads the weights in one thread for one row, and takes several times as long for 2 to 8 (docs/performance.md).
One row against the weights in as many blocks as there are threads, and W x^T for more, have neither cliff in MKL. Only the
order of summation differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 8

Replacement = tuple[nn.Module, Callable[[Tensor], Tensor]]


def replacements(module: nn.Module) -> list[Replacement]:
    """The linears inside a module that are better replaced, each with the forward to use instead: plain float32 ones on the
    CPU, where torch has MKL."""
    if not torch.backends.mkl.is_available():
        return []
    return [
        (part, _few_rows(part))
        for part in module.modules()
        if type(part) is nn.Linear
        and part.weight.device.type == "cpu"
        and part.weight.dtype == torch.float32
        and "forward" not in part.__dict__
    ]


def _few_rows(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        """x: [..., d_in] -> [..., d_out]."""
        weight, bias = module.weight, module.bias
        rows = x.numel() // x.shape[-1]
        blocks = math.gcd(weight.shape[0], torch.get_num_threads()) if weight.is_contiguous() else 1
        if rows > FEW_ROWS or (rows == 1 and blocks == 1):
            return F.linear(x, weight, bias)
        if rows == 1:
            split = weight.view(blocks, -1, weight.shape[1])
            column = x.reshape(1, 1, -1).expand(blocks, -1, -1).transpose(1, 2)  # as a column from the start it would be slow
            product = torch.bmm(split, column) if bias is None else torch.baddbmm(bias.view(blocks, -1, 1), split, column)
            return product.view(*x.shape[:-1], -1)
        columns = x.reshape(rows, -1).t()
        product = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
        return product.t().reshape(*x.shape[:-1], -1).contiguous()

    forward.passing = True  # pyright: ignore[reportFunctionMemberAccess]
    return forward


@contextmanager
def in_use(replaced: Sequence[Replacement]) -> Iterator[None]:
    """Use the replacements until the block ends, where nobody else has put one. A thread that loses them early gets
    nn.Linear's own forward: as right."""
    for module, forward in replaced:
        module.__dict__.setdefault("forward", forward)
    try:
        yield
    finally:
        for module, forward in replaced:
            if module.__dict__.get("forward") is forward:
                module.__dict__.pop("forward", None)
