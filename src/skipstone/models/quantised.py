"""Models whose weights a package has quantised: which of them are tested here, what they need, and where their kernels are."""

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
    """A way to quantise, each with a test in tests/models/test_quantised.py.

    package: the module that has the kernels. kernels: what the names of its tested kernels (see `kernel`) begin with.
    install: what to do where the package is missing. unloadable: why transformers cannot load its checkpoints, None where it
    can.
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
OWNERS = {
    "bitsandbytes": "bitsandbytes",
    "torchao": "torchao",
    "hqq": "hqq",
    "optimum": "quanto",
    "compressed_tensors": "compressed-tensors",
    "gptqmodel": "gptq",
    "gguf": "gguf",
}
"""Packages that kernels come from, and their methods."""


def kernel(module: nn.Module) -> str | None:
    """What computes a quantised layer: its package, and the classes of the layer and of its weight that are the package's.
    None for a layer that is not quantised."""
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
    """The quantised layers of a model, by what computes them."""
    found: dict[str, list[nn.Module]] = {}
    for module in model.modules():
        if (name := kernel(module)) is not None:
            found.setdefault(name, []).append(module)
    return found


def named(config: Any) -> str | None:
    """transformers' name of the method of a quantization config, an object or plain JSON; None where it has none."""
    method = config.get("quant_method") if isinstance(config, dict) else getattr(config, "quant_method", None)
    return None if method is None else str(getattr(method, "value", method))


def method_of(model: Any) -> str | None:
    """How a model is quantised, by its config or by what its layers are; None for one that is not."""
    found = kernels(model)
    said = named(getattr(model.config, "quantization_config", None))
    if getattr(model, "hf_quantizer", None) is not None and (said != "gguf" or found):  # a GGUF file may be unpacked
        return said or "an unknown method"
    if found:
        return OWNERS[next(iter(found)).partition(" ")[0]]
    dtypes = {str(one.dtype) for one in model.parameters() if not one.is_floating_point()}
    return said or ", ".join(sorted(dtypes)) if dtypes else None


def refuse(model: Any) -> None:
    """ValueError for a model whose quantised kernels are not tested here."""
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
            f"the model is quantised ({method}), expected one of {', '.join(METHODS)}, whose kernels are tested here: load it "
            "unquantised, or quantised by one of those"
        )


def expect_loadable(config: Any) -> None:
    """ValueError for a checkpoint, by its quantization config, whose kernels are not tested here or which transformers cannot
    load; ImportError where the package that has them is missing."""
    method = named(config)
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
    """Have the kernels of a quantised model in the form that they keep: many unpack or repack their weights when they first
    run, compressed-tensors those of the whole model, in a hook of it. One token goes through the model."""
    if kernels(model):
        with torch.no_grad(), stable_defaults():
            model(torch.zeros((1, 1), dtype=torch.int64, device=model.device), use_cache=False)


def stored(model: nn.Module, parameters: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Names and plain tensors of all that a model keeps: its parameters, in parts where a package's class holds several, and
    the buffers of quantised layers. parameters: names and values of the former."""
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
