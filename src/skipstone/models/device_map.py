"""Models on several devices, as dispatched by accelerate (`device_map`): where modules compute, and the values of their
weights.

accelerate puts a hook on every module with parameters. The hook moves inputs to the module's device. It also loads offloaded
weights from the CPU's memory or from disk; between two calls they are on the meta device.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from skipstone.models.tensor_parallel import is_sharded


def usable_device(device: str | torch.device) -> torch.device:
    """The device of a name; "auto" is CUDA if available, else the CPU. ValueError for a device that torch does not know or this
    machine does not have."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
        torch.empty(1, dtype=torch.float32, device=place)
    except (RuntimeError, AssertionError) as error:  # torch without CUDA asserts
        raise ValueError(f"device {str(device)!r} cannot be used here: {str(error).splitlines()[0]}") from None
    return place


def hooks(module: Any) -> list[Any]:
    """accelerate's hooks of a module; empty if it was not dispatched."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", None) or [hook])


def computes_on(module: Any) -> torch.device:
    """The device of a module's inputs: that of its weights, or of its hook if these are offloaded."""
    device_of_weights = next(module.parameters()).device
    devices = (getattr(hook, "execution_device", None) for hook in hooks(module)) if device_of_weights.type == "meta" else ()
    return next((torch.device(device) for device in devices if device is not None), device_of_weights)


def input_device(model: Any) -> torch.device:
    """The device of a model's input embedding. `model.device` may be that of an offloaded weight."""
    return computes_on(model.get_input_embeddings())


def lacks_hooks(model: Any) -> bool:
    """Whether a parameter has no hook, on its module or a parent, that moves inputs to it or, if it is offloaded, loads it."""

    def bare(module: Any, brought: bool, loaded: bool) -> bool:
        for hook in hooks(module):
            # the hook of a dispatched model itself names a device, but moves inputs no further than to its first layer
            brought |= module is not model and getattr(hook, "execution_device", None) is not None
            loaded |= getattr(hook, "weights_map", None) is not None
        parameters = [one for one in module._parameters.values() if one is not None]
        if any(not (loaded if one.is_meta else brought or loaded) for one in parameters):
            return True
        return any(bare(child, brought, loaded) for child in module.children())

    return bare(model, False, False)


def named_values(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and values of all parameters, including offloaded and sharded ones. ValueError for a parameter without values.

    A sharded parameter is gathered in all processes, so all of them must call this.
    """
    tied = getattr(model, "all_tied_weights_keys", None) or {}
    for name, parameter in model.named_parameters():
        special = parameter.is_meta or is_sharded(parameter)
        if special and name in tied:
            continue
        yield name, _values(model, name, parameter) if special else parameter


def _values(model: Any, name: str, parameter: Tensor) -> Tensor:
    if is_sharded(parameter):
        return parameter.full_tensor()  # type: ignore[attr-defined]
    owners = name.split(".")
    for depth in range(len(owners) - 1, -1, -1):  # the module itself, then those that it is part of
        for hook in hooks(model.get_submodule(".".join(owners[:depth]))):
            if (stored := getattr(hook, "weights_map", None)) is not None:
                return stored[".".join(owners[depth:])]
    raise ValueError(f"the weight {name} is on the meta device and nobody has its values: load the model with its weights")
