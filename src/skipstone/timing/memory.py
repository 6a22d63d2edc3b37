"""The most memory that was held at once: on a GPU what torch's allocator held, on a CPU the process's resident set (Linux)."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import torch

_CLEAR, _STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")
_RESET_PEAK = "5"  # proc(5): sets the peak of the resident set to what it is now


def reset(device: torch.device) -> bool:
    """Forget earlier peaks. False where the system cannot."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return True
    with suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK)
        return True
    return False


def peak(device: torch.device) -> int | None:
    """Bytes at the highest since a `reset` that succeeded; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError):
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return None
