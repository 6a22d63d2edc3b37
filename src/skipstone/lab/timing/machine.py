"""The machine of a run: its bandwidth ceiling, and the provenance of figures."""

import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native.weights import matrix_bytes, quantised_bytes
from skipstone.lab.timing.measure import run_tokens, store_for, timings

PACKAGES = ("skipstone", "torch", "transformers", "tokenizers", "numpy", "scikit-learn")  # named with their versions


def bandwidth(device: torch.device, megabytes: int | None = None) -> float:
    """Bytes per second that the device's memory delivers: the better of a copy (read and write) and a matrix-vector product.

    megabytes: size of the buffer, larger than any cache (default: 256 on CPU, 1024 on CUDA).
    """
    size = (megabytes or (1024 if device.type == "cuda" else 256)) << 20
    width = 4096
    source = torch.ones((max(size // 4 // width, 1), width), dtype=torch.float32, device=device)
    target, vector = torch.empty_like(source), torch.ones(width, dtype=torch.float32, device=device)
    held = source.numel() * source.element_size()
    copy = min(timings(lambda: target.copy_(source), device))
    product = min(timings(lambda: torch.mv(source, vector), device))
    return max(2 * held / copy, held / product)


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that one token must read. An embedding table that is not also the head is left out, since a token reads
    one row of it. For a mixture of experts all experts count, an upper bound."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()
    total = sum(matrix_bytes(one, None) for one in model.parameters())  # shared tensors are listed once
    tied = head is not None and head.weight is embedding.weight
    return total if tied else total - matrix_bytes(embedding.weight, None)


def kv_bytes(model: PreTrainedModel) -> int:
    """Bytes of keys and values of one token in all layers of our KV cache."""
    runner = ModelRunner(model)
    store = store_for(runner, 1)
    with torch.inference_mode():
        run_tokens(runner, store, torch.zeros((1, 1), dtype=torch.long, device=runner.device), 0)
    return store.bytes() // (store.capacity + 1)


def describe_ceiling(name: str, found: dict[str, Any], about: dict[str, Any] | None = None) -> str:
    """The ceiling in a sentence. about: the model's line, if the sentence shall name its dtype and device."""
    mark = "SYNTHETIC MODEL (random weights): " if about and about["synthetic"] else ""
    where = f", {about['dtype']}, {about['device']}" if about else ""
    bandwidth, speed = found["bandwidth_gb_per_second"], found["tokens_per_second"]
    return f"{mark}{name}{where}: {bandwidth:.1f} GB/s of memory allow plain decoding at most {speed:.0f} tokens/s."


def ceiling(model: PreTrainedModel, mean_length: float, megabytes: int | None = None) -> dict[str, Any]:
    """The limit of tokens per second at batch 1 by memory bandwidth alone: bandwidth over bytes of weights and KV per token.

    mean_length: tokens in the KV cache at a typical step. A model that fits into the processor's caches may exceed the limit.
    """
    speed = bandwidth(model.device, megabytes)
    quantize = ModelRunner(model).engine.quantize
    weights = quantised_bytes(model, quantize) if quantize else weight_bytes(model)
    kv = kv_bytes(model) * mean_length
    return {
        "bandwidth_gb_per_second": speed / 1e9,
        "weight_bytes_per_token": weights,
        "kv_bytes_per_token": kv,
        "tokens_per_second": speed / (weights + kv),
    }


def provenance(argv: list[str], seed: int) -> dict[str, Any]:
    """Where and how a run was made, as plain JSON values."""
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": argv,
        "seed": seed,
        "git": _git(),
        "python": platform.python_version(),
        "packages": versions(PACKAGES),
        "platform": platform.platform(),
        "cpu": cpu(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """The version of each package, None where it is not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for name in found:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _git() -> dict[str, Any] | None:
    """Commit of the source tree and whether it was changed since; None for an installed package."""
    here = Path(__file__).resolve().parent

    def ask(*arguments: str) -> str:
        command = ["git", "-C", str(here), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        ask("ls-files", "--error-unmatch", Path(__file__).name)  # an installed package may lie in another project's repository
        return {"sha": ask("rev-parse", "HEAD"), "dirty": bool(ask("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return None


def cpu() -> str:
    """The processor's name; `platform` knows only its architecture on Linux."""
    listing = Path("/proc/cpuinfo")
    for line in listing.read_text(errors="replace").splitlines() if listing.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or sys.platform
