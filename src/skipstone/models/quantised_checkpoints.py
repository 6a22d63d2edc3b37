"""Models quantised by another package: the tested kernels, what they need, and how to find them."""

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from skipstone.models.torch_defaults import stable_defaults

EXTRA = 'pip install "skipstone[quantised]"'


@dataclass(frozen=True)
class Quantisation:
    """A quantisation method, tested in tests/models/test_quantised.py.

    package: Python module with the kernels. kernels: prefixes of the names of its tested kernels (see `kernel`). install: how
    to install a missing package. unloadable: why transformers cannot load its checkpoints, or None.
    """

    package: str
    kernels: tuple[str, ...]
    install: str = EXTRA
    unloadable: str | None = None


_GPTQMODEL = "pip install --no-deps gptqmodel optimum, and what they import (docs/models.md)"
METHODS: dict[str, Quantisation] = {
    "bitsandbytes": Quantisation("bitsandbytes", ("bitsandbytes Linear8bitLt", "bitsandbytes Linear4bit")),
    "torchao": Quantisation("torchao", ("torchao Int8Tensor", "torchao IntxUnpackedToInt8Tensor")),
    "hqq": Quantisation(
        "hqq",
        ("hqq HQQLinear",),
        unloadable="load the unquantised model and quantise it by hqq's AutoHQQHFModel.quantize_model",
    ),
    "quanto": Quantisation("optimum.quanto", ("optimum QLinear of WeightQBytesTensor",)),
    "compressed-tensors": Quantisation("compressed_tensors", ("compressed_tensors Linear",)),
    "gptq": Quantisation("gptqmodel", ("gptqmodel Torch",), _GPTQMODEL),
    "awq": Quantisation("gptqmodel", ("gptqmodel Torch",), _GPTQMODEL),
}
"""By transformers' `quant_method`."""
OWNERS = {known.package.partition(".")[0]: name for name, known in reversed(METHODS.items())} | {"gguf": "gguf"}
"""Packages with kernels, and their methods."""


def kernel(module: nn.Module) -> str | None:
    """The name of a quantised layer's kernel: its package, and the package's classes of the layer and its weight. None for a
    plain layer."""
    own = [one for one in module._parameters.values() if one is not None]
    if not own and not [*module.buffers(recurse=False)]:
        return None
    if type(module).__name__.startswith("Gguf"):  # transformers' own classes
        return f"gguf {type(module).__name__}"
    if hasattr(module, "quantization_scheme"):  # compressed-tensors leaves torch's
        return f"compressed_tensors {type(module).__name__}"
    owners = {type(one): type(one).__module__.partition(".")[0] for one in (module, *own)}
    names = [kind.__name__ for kind, owner in owners.items() if owner in OWNERS]
    return f"{next(owner for owner in owners.values() if owner in OWNERS)} {' of '.join(names)}" if names else None


def kernels(model: nn.Module) -> dict[str, list[nn.Module]]:
    """The quantised layers of a model, by kernel."""
    found: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        if (name := kernel(module)) is not None:
            found.setdefault(name, []).append(module)
    return found


def quantization_method(config: Any) -> str | None:
    """transformers' method name in a quantization config (object or JSON), or None."""
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def method_of(model: Any) -> str | None:
    """The quantisation method of a model, by its config or its layers; None for a plain model."""
    by_kernel = kernels(model)
    configured = quantization_method(getattr(model.config, "quantization_config", None))
    if getattr(model, "hf_quantizer", None) is not None and (configured != "gguf" or by_kernel):  # a GGUF file may be unpacked
        return configured or "an unknown method"
    if by_kernel:
        return OWNERS[next(iter(by_kernel)).partition(" ")[0]]
    dtypes = {str(one.dtype) for one in model.parameters() if not one.is_floating_point()}
    return configured or ", ".join(sorted(dtypes)) if dtypes else None


def refuse_untested_kernels(model: Any) -> None:
    """ValueError for a model with untested kernels."""
    method = method_of(model)
    if method is None:
        return
    _expect(method)
    for name in kernels(model):
        if not name.startswith(METHODS[method].kernels):
            raise ValueError(
                f"the model is quantised ({method}), its layers are {name}, expected {' or '.join(METHODS[method].kernels)}, "
                "which are tested here: quantise it otherwise, or load it unquantised"
            )
    for part, module in (("LM head", model.get_output_embeddings()), ("embedding", model.get_input_embeddings())):
        if module is not None and (name := kernel(module)) is not None:
            raise ValueError(f"the model's {part} is quantised ({name}), expected a plain one: quantise the layers only")


def _expect(method: str) -> None:
    if method == "gguf":
        raise ValueError(
            "the model is quantised (gguf) and keeps its weights packed, expected unpacked ones: load the file by "
            "skipstone.load, or with quantization_config=GgufConfig(dequantize=True)"
        )
    if method not in METHODS:
        raise ValueError(
            f"the model is quantised ({method}), expected one of {', '.join(METHODS)} (tested here): load it "
            "unquantised, or quantised by one of those"
        )


def expect_loadable(config: Any) -> None:
    """Check a checkpoint's quantization config. ValueError for untested kernels or a method that transformers cannot load,
    ImportError if the package is missing."""
    method = quantization_method(config)
    if method is None:
        return
    _expect(method)
    known = METHODS[method]
    if known.unloadable is not None:
        raise ValueError(f"the checkpoint is quantised ({method}), which transformers cannot load: {known.unloadable}")
    try:
        importlib.import_module(known.package)
    except ImportError as error:
        raise ImportError(f"the checkpoint is quantised ({method}), which needs {known.package}: {known.install}") from error


def warm_up_kernels(model: Any) -> None:
    """Run one token through a quantised model. Many kernels repack their weights in their first run. A hook of
    compressed-tensors does that for the whole model."""
    if kernels(model):
        with torch.no_grad(), stable_defaults():
            model(torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False)


def stored_tensors(model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Names and plain tensors of all parameters, and of the buffers of quantised layers. A package's tensor class is split into
    its parts. parameters: names and values."""
    for name, parameter in parameters:
        yield from _parts(name, parameter)
    for place, module in model.named_modules():
        if kernel(module) is not None:
            yield from ((f"{place}.{name}", one) for name, one in module.named_buffers(recurse=False))


def _parts(name: str, one: Any) -> Iterator[tuple[str, Tensor]]:
    if type(one).__module__.partition(".")[0] in OWNERS and hasattr(one, "__tensor_flatten__"):
        for part in one.__tensor_flatten__()[0]:
            yield from _parts(f"{name}.{part}", getattr(one, part))
    else:
        yield name, one
