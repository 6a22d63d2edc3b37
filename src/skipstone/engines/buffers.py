"""The one place where the memory of a tensor is handed to C or compared by its address."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from skipstone.engines.host_transfer import CPU


def dense(tensor: Tensor, free: int = 0) -> Tensor:
    """The tensor itself if its elements lie next to each other in memory, else a copy in which they do. free: number of
    leading dimensions that may have any stride."""
    return tensor if tensor.is_contiguous() or _is_dense(tensor, free) else tensor.contiguous()


def pointer(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, free: int = 0) -> int:
    """The address of a tensor for C code that reads or writes `shape` elements of `dtype`.

    name: what the tensor is called in an error. free: as in `dense`; C is told the strides of these dimensions. The caller
    keeps the tensor alive while C uses it. ValueError for another dtype, device, shape or layout.
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
    """A number that changes when a tensor gets other memory. It is for comparisons only, never for C."""
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
