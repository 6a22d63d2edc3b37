"""Errors of the accelerator that do not go away."""

from typing import Any

import torch

ACCELERATOR_ERROR: Any = getattr(torch, "AcceleratorError", ())  # torch has it from 2.8 on
MAX_DEVICE_ERRORS = 2
"""Consecutive device errors after which the model's thread ends. A broken CUDA context stays broken, and only a new process
gets another one."""


class DeviceError(Exception):
    """The device has failed several times in a row."""


class DeviceErrorCounter:
    """Counts consecutive device errors, without a successful step between them."""

    def __init__(self) -> None:
        self._count = 0

    def reset(self) -> None:
        """A step has succeeded."""
        self._count = 0

    def add(self, error: Exception) -> None:
        """Count an error if it is the device's. DeviceError if there are too many."""
        if not is_device_error(error):
            return
        self._count += 1
        if self._count >= MAX_DEVICE_ERRORS:
            raise DeviceError(f"{self._count} errors of the device in a row") from error


def is_device_error(error: Exception) -> bool:
    """Whether an error is one of CUDA that may stay. A lack of memory does not."""
    if isinstance(error, torch.OutOfMemoryError):
        return False
    return isinstance(error, ACCELERATOR_ERROR) or (isinstance(error, RuntimeError) and "CUDA" in str(error))
