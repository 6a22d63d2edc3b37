"""Limits of the memory that the clients of a server can make it use. Everything that a request creates and leaves has one."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

MAX_BATCH_GROUPS = 4
"""Number of methods that have rows at a time. Each takes steps of its own, so more of them would be slow."""
KV_CACHE_SHARE = 0.25
"""Share of the memory of the model's device for keys and values of all batch groups. It is the default of a server."""
MAX_METHOD_STATES = 64
"""Number of method settings per model that keep what they have learnt."""
METHOD_STATE_BYTES = 256 << 20
"""Limit of these states together. The one in use always stays."""
SMALL_STATE_BYTES = 1 << 16
"""Assumed size of a state of a few hundred numbers."""
COPIES_SHARE = 0.5
"""Share of the free memory for a copy of a model's weights in fewer bits, which drafting reads."""
GRAMMAR_BYTES = 512 << 20
"""Limit of the compiled grammars of all requests together."""
SMALL_GRAMMAR_BYTES = 1 << 20
"""Smallest assumed size of a compiled grammar."""
MAX_LEXER_STATES = 50_000
"""States that llguidance may add to one compiled grammar while a text is written. They take about 700 bytes each."""
UNREAD_BYTES = 64 << 20
"""Limit of all events together that clients have not read yet."""
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where Linux has the cgroups, and the paths of those that limit this process."""
CGROUP_FILES = {
    "": ("memory.max", "memory.current", ""),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""Controllers of cgroups (version 2, version 1) -> names of the files with the limit and the use, prefix of the use's parts."""
ASSUMED_MEMORY_BYTES = 8 << 30
"""Assumed memory of a machine that does not say how much it has."""


def device_memory_bytes(device: torch.device) -> int:
    """The memory of a device; of a CPU that of the machine, or of its container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):
        return ASSUMED_MEMORY_BYTES
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for limit, _ in _cgroup_memory())])


def available_memory_bytes() -> int:
    """Memory that this process can still take without swapping, within its container. The page cache counts as free."""
    listing = Path("/proc/meminfo")
    lines = listing.read_text().splitlines() if listing.exists() else []
    machine = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), ASSUMED_MEMORY_BYTES)
    return max(0, min([machine, *(limit - used for limit, used in _cgroup_memory())]))


def _cgroup_memory() -> Iterator[tuple[int, int]]:
    """(limit, use without the page cache) in bytes of every cgroup with a limit that this process is in."""
    lines = OWN_CGROUP.read_text().splitlines() if OWN_CGROUP.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers not in CGROUP_FILES:
            continue
        limit_file, use_file, prefix = CGROUP_FILES[controllers]
        root = CGROUPS / controllers
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            with suppress(OSError):  # a container shows only a part of the tree, and the root has no limit
                if (limit := (folder / limit_file).read_text().strip()).isdecimal():
                    parts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                    cached = sum(int(parts.get(f"{prefix}{kind}_file", 0)) for kind in ("active", "inactive"))
                    yield int(limit), int((folder / use_file).read_text()) - cached
            if folder == root:
                break
