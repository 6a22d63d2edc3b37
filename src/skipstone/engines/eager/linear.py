"""Faster linear layers for a few rows in float32.

On the CPU `F.linear` uses one thread for one row, and is several times slower for 2 to 8 rows (docs/lab/performance.md). MKL is
fast if one row is multiplied by one block of the weights per thread, and if more rows are computed as W x^T. On a GPU cuBLAS is
several times slower than W x^T for some numbers of rows. Only the order of summation differs.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from skipstone.models.packed_weight import PackedWeight

_PLAIN = (Tensor, nn.Parameter, PackedWeight)
FEW_ROWS = 8  # rows up to which W x^T is faster than F.linear on the CPU
TRANSPOSED_ROWS = range(8, 32)
"""Numbers of rows for which a GPU uses W x^T. Compiled passes have powers of two, here 8 and 16. It takes .2 to .4 of the time
of F.linear for small layers and .9 to 1.2 for large ones, but 4.5 times as long for 2 rows (docs/lab/performance.md)."""


def _is_plain(module: nn.Module, device: str) -> bool:
    """Whether a module is a plain float32 linear layer on a type of device. torchao keeps the class and quantises the
    weight."""
    if type(module) is not nn.Linear or type(module.weight) not in _PLAIN:
        return False
    return module.weight.device.type == device and module.weight.dtype == torch.float32


def pays(module: nn.Module) -> bool:
    """Whether `few_rows` is faster for a module: a plain float32 linear layer on the CPU, if torch has MKL."""
    return _is_plain(module, "cpu") and torch.backends.mkl.is_available()


def transposed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + bias as W x^T. x: [..., d_in]. weight: [d_out, d_in]. bias: [d_out]. Returns [..., d_out]."""
    columns = x.reshape(-1, x.shape[-1]).t()  # [d_in, rows]
    product = weight @ columns if bias is None else torch.addmm(bias[:, None], weight, columns)  # [d_out, rows]
    return product.t().reshape(*x.shape[:-1], -1).contiguous()


def is_faster_transposed(module: nn.Module) -> bool:
    """Whether `TransposedLinear` is faster for a module: a plain float32 linear layer on a GPU."""
    return _is_plain(module, "cuda")


class TransposedLinear(nn.Linear):
    """A linear layer that computes W x^T if that is faster on a GPU. x: [..., d_in] -> [..., d_out]."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.numel() // input.shape[-1]
        return (transposed if rows in TRANSPOSED_ROWS else F.linear)(input, self.weight, self.bias)


def few_rows(module: nn.Linear, x: Tensor) -> Tensor:
    """x W^T + bias. x: [..., d_in] -> [..., d_out]."""
    weight, bias = module.weight, module.bias
    rows = x.numel() // x.shape[-1]
    if rows > FEW_ROWS:
        return F.linear(x, weight, bias)
    if rows > 1:
        return transposed(x, weight, bias)
    blocks = math.gcd(weight.shape[0], torch.get_num_threads()) if weight.is_contiguous() else 1
    if blocks == 1:
        return F.linear(x, weight, bias)
    split = weight.view(blocks, -1, weight.shape[1])  # [blocks, d_out / blocks, d_in]
    column = x.reshape(1, 1, -1).expand(blocks, -1, -1).transpose(1, 2)  # [blocks, d_in, 1]; x.reshape(1, -1, 1) is slow
    product = torch.bmm(split, column) if bias is None else torch.baddbmm(bias.view(blocks, -1, 1), split, column)
    return product.view(*x.shape[:-1], -1)
