"""Tensors between host, devices and C code: transfers that avoid waiting, addresses, the message for missing memory.

No other file takes the address of a tensor.
"""

import errno
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

ALLOCATION = re.compile(r"tried to allocate (\d+) bytes")  # of torch's allocator for the CPU

CPU = torch.device("cpu")  # torch's default device may be another one


def on_device(values: Sequence[Any], device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """A tensor of host values, made without synchronising with an accelerator as `torch.tensor(values, device=...)` would.

    dtype: None means bool for bools, float32 if there are fractions, and int64 otherwise, independent of torch's default.
    """
    tensor = torch.tensor(values, dtype=dtype, device=CPU)  # with a dtype that fits all values
    if dtype is None and tensor.is_floating_point():  # in torch's default dtype
        tensor = torch.tensor(values, dtype=torch.float32 if tensor.numel() else torch.int64, device=CPU)
    return tensor.to(device, non_blocking=True)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor on another device. Only a copy to the host waits, since the host reads it at once."""
    return tensor.to(device, non_blocking=device.type != "cpu")


@cache
def cached_arange(size: int, device: torch.device) -> Tensor:
    """0, 1, 2, ... as int64 [size], made once and shared. Never write to it."""
    with torch.inference_mode(False):  # one made in inference mode could not be used outside of it
        return torch.arange(size, device=device, dtype=torch.int64)


def read(*tensors: Tensor) -> list[list[list[int]]]:
    """The values of int64 or bool tensors [B, n], each with its own n, in one transfer from an accelerator."""
    if is_on_host(tensors[0]):
        return [tensor.tolist() for tensor in tensors]
    rows = torch.cat([tensor.long() for tensor in tensors], 1).tolist()
    values, start = [], 0
    for tensor in tensors:
        stop = start + tensor.shape[1]
        values.append([row[start:stop] for row in rows])
        start = stop
    return values


def out_of_memory(error: BaseException) -> str | None:
    """Message and remedy for a failed allocation on the host or on a device; None for any other error."""
    message = str(error).splitlines()[0] if str(error) else ""
    is_refused = isinstance(error, OSError) and error.errno == errno.ENOMEM  # by the system, to mmap
    is_memory_error = isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "can't allocate memory" in message
    if not is_memory_error and not is_refused:
        return None
    allocation = ALLOCATION.search(message)
    amount = "" if allocation is None else f" for {int(allocation[1]) / 2**30:.2f} GiB more"
    return (
        f"there is not enough memory{amount}: take a smaller dtype (bfloat16), quantised weights (quantize int8 or int4), "
        "fewer rows or a shorter context"
    )


def is_on_host(tensor: Tensor) -> bool:
    """Whether a tensor's values can be read without waiting. An accelerator would first finish all queued work."""
    return tensor.device.type == "cpu"


def left_padded(rows: Sequence[Sequence[int]], fill: int = 0) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask), both [B, T] int64: rows of ids that end together, with `fill` and mask 0 before them."""
    width = max(map(len, rows))
    ids = torch.tensor([[fill] * (width - len(row)) + list(row) for row in rows], dtype=torch.int64, device=CPU)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], dtype=torch.int64, device=CPU)
    return ids, mask


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
