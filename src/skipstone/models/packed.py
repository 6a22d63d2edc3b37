"""A parameter whose memory was given up: an engine has its values in a form of its own, and they are unpacked to be read."""

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only


class WeightSource(Protocol):
    """Where the values of a weight are."""

    def unpacked(self) -> Tensor:
        """A plain tensor of the values, in the weight's shape and dtype, made anew at every call."""
        ...


class PackedWeight(Tensor):
    """Stands in a module for a parameter that nobody keeps. Shape, dtype, device and version are known without the values.

    Every operation reads values that are unpacked for it and freed again; operations that would change them are a RuntimeError.
    A copy (deepcopy, pickle, a state_dict) is plain. Whoever reads or sets `.data`, as `module.to` does for another dtype,
    makes it an ordinary parameter in place: tied weights stay tied.
    """

    source: WeightSource
    _is_param = True  # by which torch knows parameters of other classes
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # all comes to __torch_dispatch__

    @staticmethod
    def __new__(cls, source: WeightSource, like: Tensor) -> "PackedWeight":
        """like: the parameter that it stands for."""
        with torch.inference_mode(False):  # an inference tensor counts no versions
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
        """The values of the ordinary parameter that this becomes."""
        self._become(self._values())
        return self.data

    @data.setter
    def data(self, values: Tensor) -> None:
        if values is not self:
            self._become(values)

    def _values(self) -> Tensor:
        """An ordinary tensor of the values in inference mode, too: views of it are what views of the parameter would be."""
        with torch.inference_mode(False), torch.no_grad():
            return self.source.unpacked()

    def _become(self, values: Tensor) -> None:
        """Make this object an ordinary parameter."""
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
    """Whether weights of a model were given up."""
    return any(isinstance(one, PackedWeight) for one in model.parameters())
