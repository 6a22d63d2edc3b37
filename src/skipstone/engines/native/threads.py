"""Number of threads of the native engine: the user's choice, or all cores that the process may use."""

import math
import os
from pathlib import Path

VARIABLE = "SKIPSTONE_THREADS"
"""Environment variable for the number of threads of the native engine; by default that of `cores`, at most MAX_THREADS."""
MAX_THREADS = 64  # of the library


def requested_number() -> int | None:
    """The value of SKIPSTONE_THREADS, None if unset or empty. ValueError if it is no valid number."""
    value = os.environ.get(VARIABLE) or None
    if value is None:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= MAX_THREADS:
        raise ValueError(f"{VARIABLE} must be a whole number from 1 to {MAX_THREADS}, found {value!r}")
    return int(value)


def cores(root: Path = Path("/")) -> int:
    """Number of physical cores that this process may use, at least 1.

    It counts the CPUs of the process's affinity mask, siblings on one core once, and the whole CPUs of its cgroups' quotas.
    root: the folder that has `sys` and `proc`.
    """
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    topology = root / "sys/devices/system/cpu"
    siblings = {_read(topology / f"cpu{cpu}/topology/thread_siblings_list") or str(cpu) for cpu in cpus}
    return max(1, int(min(len(siblings), _cpu_quota(root))))


def _cpu_quota(root: Path) -> float:
    """The smallest CPU quota of the process's cgroups and the groups around them, in CPUs; infinite if there is none."""
    quota, mounts = math.inf, root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = mounts / "cpu" if controllers else mounts  # version 1 of cgroups has a mount for each controller
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
            limit = " ".join(_read(folder / name) for name in files).split()
            if len(limit) == 2 and limit[0].isdecimal():  # else "max" or -1
                quota = min(quota, int(limit[0]) / int(limit[1]))
    return quota


def _read(path: Path) -> str:
    """The text of a file of the kernel, without spaces around it; empty if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
