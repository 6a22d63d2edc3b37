"""Limits of the memory that a server's clients can make it take. Whatever a request creates and leaves behind has one here."""

import os
from pathlib import Path

import torch

MAX_BATCH_GROUPS = 4
"""Methods that have rows at a time. Every group takes a step of its own, so more of them are slow whatever memory there is."""
KV_CACHE_SHARE = 0.25
"""Share of the memory of the model's device that the keys and values of all batch groups may take, unless a server is told."""
MAX_METHOD_STATES = 64
"""Number of method settings per model that keep what they have learnt."""
METHOD_STATE_BYTES = 256 << 20
"""What these states may take together. The one that is in use is kept in any case."""
SMALL_STATE_BYTES = 1 << 16
"""What a state counts as that has a few hundred numbers."""
WEIGHT_COPIES_SHARE = 0.5
"""Share of the machine's memory that a model's weights in fewer bits may take, which drafting reads."""
GRAMMAR_BYTES = 512 << 20
"""What the compiled grammars of all requests may take together."""
SMALL_GRAMMAR_BYTES = 1 << 20
"""What a grammar counts as at least that is compiled once."""
MAX_LEXER_STATES = 50_000
"""States that llguidance may add to one compiled grammar while a text is written. They take about 700 bytes each."""
UNREAD_BYTES = 64 << 20
"""What all events may take together that clients have not read yet."""
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
"""Where Linux says how much memory a container has."""
ASSUMED_MEMORY_BYTES = 8 << 30
"""Of a machine that does not say how much it has."""


def device_memory_bytes(device: torch.device) -> int:
    """The memory of a device; of a CPU that of the machine, or of its container."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if not hasattr(os, "sysconf"):
        return ASSUMED_MEMORY_BYTES
    found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else ""
    return min(found, int(limit)) if limit.isdigit() else found
