"""A parameter without memory of its own: an engine has the packed values, and every read unpacks them."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


class WeightSource(Protocol):
    """Holds the values of a weight."""

    def unpacked(self) -> Tensor:
        """A new plain tensor of the values, in the weight's shape and dtype."""
        ...


class PackedWeight(Tensor):
    """Replaces a parameter in a module. Shape, dtype, device and version are known without the values.

    Every operation unpacks the values and frees them again. Operations that would change them raise a RuntimeError. A copy
    (deepcopy, pickle, state_dict) is plain. Reading or setting `.data`, as `module.to` does for another dtype, turns it into an
    ordinary parameter in place, so that tied weights stay tied.
    """

    source: WeightSource
    _is_param = True  # marks parameters of other classes for torch
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # leaves everything to __torch_dispatch__

    @staticmethod
    def __new__(cls, source: WeightSource, like: Tensor) -> "PackedWeight":
        """like: the replaced parameter."""
        with torch.inference_mode(False):  # inference tensors have no version counter
            made: Any = torch.Tensor._make_wrapper_subclass(
                cls, like.shape, dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
            )
        made.source = source
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        named = [*zip(func._schema.arguments, args, strict=False)]
        named += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
        for argument, value in named:
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and any(isinstance(leaf, cls) for leaf in tree_leaves(value)):
                raise RuntimeError(
                    "the weights of this model were given up for the native engine's and cannot be changed: load it with "
                    "keep_weights=True"
                )
        args, kwargs = tree_map_only(cls, lambda one: one._values(), (args, kwargs))
        return func(*args, **kwargs)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        """Become an ordinary parameter, and return its values."""
        self._become(self._values())
        return self.data

    @data.setter
    def data(self, values: Tensor) -> None:
        if values is not self:
            self._become(values)

    def _values(self) -> Tensor:
        """An ordinary tensor of the values, also in inference mode, so that its views behave like views of a parameter."""
        with torch.inference_mode(False), torch.no_grad():
            return self.source.unpacked()

    def _become(self, values: Tensor) -> None:
        """Turn this object into an ordinary parameter."""
        with torch.inference_mode(False):
            plain = nn.Parameter(values.clone() if values.is_inference() else values, self.requires_grad)
        torch.utils.swap_tensors(self, plain)

    def _plain(self) -> nn.Parameter:
        return nn.Parameter(self._values(), self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        made = memo[id(self)] = self._plain()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PackedWeight({list(self.shape)}, {self.dtype})"


def is_packed(model: nn.Module) -> bool:
    """Whether a model has given up weights."""
    return any(isinstance(one, PackedWeight) for one in model.parameters())
