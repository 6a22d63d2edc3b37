"""Limits torch to one thread while an engine uses its own threads, and in forked processes."""

import ctypes
import os
from functools import cache
from pathlib import Path
from typing import Any

import torch

MAPS = Path("/proc/self/maps")  # the libraries of this process, one path at the end of a line


@cache
def _openmp() -> Any:
    """The OpenMP runtime that torch has loaded; None if it cannot be found."""
    lines = MAPS.read_text().splitlines() if MAPS.exists() else []
    path = next((line.split()[-1] for line in lines if "libgomp" in line), None)
    return None if path is None else ctypes.CDLL(path)


class SingleTorchThread:
    """Inside, torch computes on one thread for the current host thread only.

    After an operator, torch's threads spin for milliseconds on cores that the engine's threads need. `torch.set_num_threads`
    would also set the number for other host threads that first use torch meanwhile. Nothing changes if torch's OpenMP runtime
    is not found.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if (openmp := _openmp()) is not None:
            openmp.omp_set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if (openmp := _openmp()) is not None:
            openmp.omp_set_num_threads(self._before)


@cache
def alone_after_fork() -> None:
    """Limit torch to one thread in processes that this one forks. GNU's OpenMP would wait there forever for this process's
    threads."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
