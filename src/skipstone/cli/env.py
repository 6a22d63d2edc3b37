"""`skipstone env`: what a bug report needs. Nothing in it identifies the machine or its user."""

import os
import platform
from typing import Any

from skipstone.cli import terminal
from skipstone.cli.options import AS_JSON

PACKAGES = ("skipstone", "torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "accelerate")


def env(as_json: bool = AS_JSON) -> None:
    """Versions, processor, threads, GPUs and memory, for a bug report."""
    facts = collect_facts()
    if as_json:
        terminal.print_json(facts, indent=2)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = "; ".join(map(str, value)) if isinstance(value, list) else value
        print(f"{name:{width}}  {'none' if shown in (None, '') else shown}")


def collect_facts() -> dict[str, Any]:
    """The facts as plain JSON values, None for one that does not apply."""
    import torch

    from skipstone.engines.engine import QUANTIZED
    from skipstone.engines.native import library
    from skipstone.lab.timing.machine import cpu, versions

    try:
        memory = round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        memory = None
    missing = library.missing()
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return versions(PACKAGES) | {
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),  # for this process
        "torch_threads": torch.get_num_threads(),
        "memory_gib": memory,
        "engines": ["eager", "native" if missing is None else f"native: no, {missing}", "compiled"],
        "quantize": [name for name in QUANTIZED if name != "none"] if missing is None else [],  # the native engine's
        "cuda": torch.version.cuda,
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}" for gpu in gpus],
    }
