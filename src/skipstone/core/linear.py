"""Linear layers over a few rows in float32 on the CPU, in the place of nn.Linear's forward while skipstone runs a model.

`F.linear` over 2 to 5 rows costs up to four times what one row costs there (docs/performance.md): its matrix product is laid
out for many rows. The same product as W x^T has no such cliff, and over one row of a larger matrix even two equal columns are
faster than the matrix-vector product. Only the order of summation differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEW_ROWS = 5
LARGE = 1 << 19  # entries from which on one row is computed as two

Replacement = tuple[nn.Module, Callable[[Tensor], Tensor]]


def replacements(module: nn.Module, rows: int = 2) -> list[Replacement]:
    """The linears inside a module that are better replaced for passes over so many rows, each with the forward to use instead:
    plain float32 ones on the CPU, the larger ones alone where there is one row."""
    if rows > FEW_ROWS:
        return []
    return [
        (part, _few_rows(part))
        for part in module.modules()
        if type(part) is nn.Linear
        and part.weight.device.type == "cpu"
        and part.weight.dtype == torch.float32
        and "forward" not in part.__dict__
        and (rows > 1 or part.weight.numel() >= LARGE)
    ]


def _few_rows(module: nn.Linear) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        """x: [..., d_in] -> [..., d_out]."""
        weight, bias = module.weight, module.bias
        rows = x.numel() // x.shape[-1]
        if rows > FEW_ROWS:
            return F.linear(x, weight, bias)
        columns = x.reshape(rows, -1).expand(max(rows, 2), -1).t()
        product = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)
        return product[:, :rows].t().reshape(*x.shape[:-1], -1).contiguous()

    return forward


@contextmanager
def in_use(replaced: Sequence[Replacement]) -> Iterator[None]:
    """Use the replacements until the block ends. A thread that loses them early gets nn.Linear's own forward: as right."""
    for module, forward in replaced:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, _ in replaced:
            module.__dict__.pop("forward", None)
