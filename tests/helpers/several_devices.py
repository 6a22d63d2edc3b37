"""Further devices where there is only a CPU: tensors that say they are on "lazy:0" or "lazy:1" and compute on the CPU.

As on accelerators, what is on different devices cannot be computed with: every operation refuses it, but for copies, for
tensors without dimensions and for indices on the CPU.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tests.helpers.pretended import INDEXED

FIRST, SECOND = torch.device("lazy:0"), torch.device("lazy:1")
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class There(Tensor):
    """A tensor that is said to be on a pretended device. held: its values, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device | None = None, requires_grad: bool = False) -> Any:
        if device is None:  # accelerate makes parameters with the class of the ones before
            return torch.nn.Parameter(held, requires_grad)
        with torch.inference_mode(False):  # an inference tensor has no version, which views of it are asked for
            made: Any = torch.Tensor._make_wrapper_subclass(
                cls, held.size(), strides=held.stride(), dtype=held.dtype, device=device, requires_grad=False
            )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return computed(func, args, dict(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"There({self.held!r}, {self.device})"


class _Operations(TorchDispatchMode):
    """Computes every operation where its tensors are said to be."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # in inference mode operations come in one piece that are made of others
            parts = func.decompose(*args, **(kwargs or {}))
        return computed(func, args, dict(kwargs or {})) if parts is NotImplemented else parts


class _Functions(TorchFunctionMode):
    """Functions that would look for memory on the device before they reach an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func is Tensor.tolist:
            return func(args[0].to("cpu"))
        if func is Tensor.__getitem__ and isinstance(args[1], tuple):
            args = args[0], tuple(torch.tensor(one) if isinstance(one, list) else one for one in args[1])
        return func(*args, **kwargs)


@contextmanager
def pretended_devices() -> Iterator[None]:
    """Inside, tensors can be made on the pretended devices and brought there."""
    with _Functions(), _Operations():
        yield


def computed(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation's result, on the device that it was asked for or that its tensors are on. RuntimeError for several."""
    looked_at = (args[0], args[2:], kwargs) if func in INDEXED else (args, kwargs)
    tensors = [one for one in tree_leaves(looked_at) if isinstance(one, Tensor)]
    if func in INDEXED:
        tensors += [one for one in tree_leaves(args[1]) if isinstance(one, There)]
    places = {one.device for one in tensors if one.ndim or isinstance(one, There)}
    if len(places) > 1 and func not in _COPIES:
        raise RuntimeError(f"{func}: expected all tensors to be on the same device, found {sorted(map(str, places))}")
    asked = kwargs.get("device")
    device = torch.device(asked) if asked is not None else next((one.device for one in tensors[:1] if places), None)
    if asked is None and places and func not in _COPIES:
        device = places.pop()
    if asked is not None and device is not None and device.type == "lazy":
        kwargs["device"] = torch.device("cpu")
    inner_args, inner = tree_map_only(There, lambda one: one.held, (args, kwargs))
    out = func(*inner_args, **inner)
    if device is None or device.type != "lazy":
        return out
    in_place = next((one for one in tree_leaves(args) if isinstance(one, There) and one.held is out), None)
    return in_place if in_place is not None else tree_map_only(Tensor, lambda one: There(one, device), out)
