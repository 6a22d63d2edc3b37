"""`skipstone env`: what a bug report needs. Nothing in it identifies the machine or its user, except a model's name."""

import os
import platform
from typing import Any

from skipstone.cli import terminal
from skipstone.cli.option_groups import QUANTIZE, expect_model
from skipstone.cli.options import AS_JSON, argument

PACKAGES = ("skipstone", "torch", "transformers", "tokenizers", "safetensors", "numpy", "peft", "accelerate")


def env(
    model: str | None = argument("Also how a model's matrices are computed: a folder, a hub id or a .gguf file.", None),
    quantize: str = QUANTIZE,
    as_json: bool = AS_JSON,
) -> None:
    """Versions, processor, threads, GPUs and memory, for a bug report. With MODEL also the paths of its matrices."""
    expect_model(model)
    facts = collect_facts()
    if model is not None:
        facts |= model_facts(model, None if quantize == "none" else quantize)
    if as_json:
        terminal.print_json(facts, indent=2)
        return
    width = max(map(len, facts))
    for name, value in facts.items():
        separator = f"\n{'':{width}}  " if name == "matrices" else "; "
        shown = separator.join(map(_line, value)) if isinstance(value, list) else value
        print(f"{name:{width}}  {'none' if shown in (None, '') else shown}")


def collect_facts() -> dict[str, Any]:
    """The facts as plain JSON values, None for one that does not apply."""
    import torch

    from skipstone.engines.engine import QUANTIZED
    from skipstone.engines.native import library
    from skipstone.engines.native.threads import cores
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
        "cores": cores(),  # for this process
        "torch_threads": torch.get_num_threads(),
        "memory_gib": memory,
        "engines": ["eager", "native" if missing is None else f"native: no, {missing}", "compiled"],
        "quantize": [name for name in QUANTIZED if name != "none"] if missing is None else [],  # the native engine's
        "cuda": torch.version.cuda,
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, compute capability {gpu.major}.{gpu.minor}" for gpu in gpus],
    }


def model_facts(name: str, quantize: str | None) -> dict[str, Any]:
    """How a start of `generate` would compute the matrices of a model. Its weights are not loaded.

    matrices: one dict for each stored type, a `TensorPath` with its path in words. GgufError for a damaged file.
    """
    from skipstone.engines.mapped_loading import read_model
    from skipstone.engines.native import library
    from skipstone.engines.native.weights import QUANTIZED, tensor_paths
    from skipstone.models.mapped_config import UnmappableError

    facts: dict[str, Any] = {"model": name, "model_path": "native: mapped files", "matrices": []}
    if (missing := library.missing()) is not None:
        return facts | {"model_path": f"eager: loaded by transformers, since {missing}"}
    try:
        model, _ = read_model(name)
    except UnmappableError as error:
        return facts | {"model_path": f"loaded by transformers, since it cannot be mapped: {error}"}
    for path in tensor_paths(model, quantize):
        become = f"{'quantised' if path.computed in QUANTIZED else 'dequantised'} to {path.computed}"
        facts["matrices"].append(vars(path) | {"path": "computed as stored" if path.computed == path.kind else become})
    return facts


def _line(value: Any) -> str:
    """A value of a list as text."""
    if not isinstance(value, dict):
        return str(value)
    sizes = f"{value['stored_bytes'] / 1e6:.1f} MB in the files, {value['computed_bytes'] / 1e6:.1f} MB in memory"
    return f"{value['matrices']} in {value['kind']}, {value['path']}: {sizes}"
