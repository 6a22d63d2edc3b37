"""Addresses of tensors, for C code and for comparisons. No other file takes one."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skipstone.engines.host_transfer import CPU


def dense(tensor: Tensor, free: int = 0) -> Tensor:
    """The tensor if its elements are contiguous in memory, else a contiguous copy. free: number of leading dimensions that may
    have any stride."""
    return tensor if tensor.is_contiguous() or _is_dense(tensor, free) else tensor.contiguous()


def pointer(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, free: int = 0) -> int:
    """The address of a tensor for C code that reads or writes `shape` elements of `dtype`.

    name: of the tensor in errors. free: as in `dense`; C gets the strides of these dimensions. The caller keeps the tensor
    alive while C uses it. ValueError for another dtype, device, shape or layout.
    """
    fits = tensor.dtype is dtype and tensor.is_cpu and tensor.shape == shape
    if not fits or not (tensor.is_contiguous() or _is_dense(tensor, free)):
        layout = "" if tensor.is_meta or _is_dense(tensor, free) else f" with strides {list(tensor.stride())}"
        raise ValueError(
            f"the native engine wants {name} {list(shape)} in {_name(dtype)} on the CPU, found {list(tensor.shape)} in "
            f"{_name(tensor.dtype)} on {tensor.device}{layout}"
        )
    return tensor.data_ptr()


def new_buffer(
    shape: Sequence[int], dtype: torch.dtype = torch.float32, make: Callable[..., Tensor] = torch.empty
) -> tuple[Tensor, int]:
    """A new tensor on the CPU for C code to write, and its address. make: `torch.empty` or `torch.zeros`."""
    tensor = make(shape, dtype=dtype, device=CPU)
    return tensor, tensor.data_ptr()


def identity(tensor: Tensor) -> int:
    """A number that changes when a tensor gets other memory. For comparisons only, never for C."""
    return tensor.data_ptr()


def _is_dense(tensor: Tensor, free: int) -> bool:
    if not free:
        return tensor.is_contiguous()
    expected = 1
    for size, stride in zip(reversed(tensor.shape[free:]), reversed(tensor.stride()[free:]), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
