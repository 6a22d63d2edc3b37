"""A CUDA device that is not there: its tensors are torch's FakeTensors, which know shapes and devices and refuse to mix them.

Beside every fake tensor a real one on the CPU goes through the same operators, so that what is read on the host is what a GPU
would have said. Tensors on the host stay ordinary ones. Every wait of the host for the device is noted with its place.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from skipstone import AdaSD
from skipstone.decoding import draft
from skipstone.engines import choose_engine, host_transfer
from tests.helpers.conformance import FEW, ROWS

SOME_TOKENS = replace(ROWS["adasd"], make=lambda d, _: AdaSD(None, d, relaxed=False, draft_vocabulary=FEW), variant=True)
DEVICE_ROWS = ROWS | {"adasd, some tokens": SOME_TOKENS}
DEVICE = torch.device("cuda:0")
aten: Any = torch.ops.aten
MOVES = (aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten._to_copy.default)
READS = (aten._local_scalar_dense.default, aten.equal.default)
INDEXED = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default)
ATTENTION = aten.scaled_dot_product_attention.default  # it chooses a kernel by asking a CUDA build


class Pretended(TorchDispatchMode):
    """While it is entered, "cuda:0" may be computed on.

    waits: where the host has waited for the device, as "file:line operator". An operator that must know values on the device to
    tell a shape (`nonzero`, a mask as an index) raises, and so does one whose tensors lie on two devices.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fakes = FakeTensorMode(allow_non_fake_inputs=True)
        self.waits: list[str] = []
        self._under_way: list[tuple[Tensor, Tensor]] = []  # what the host has asked for without waiting, and what it will be

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.prim.device.default:
            return args[0].fake_device
        if func in MOVES:
            return self._moved(func, args, kwargs)
        tensors = list(_tensors((*args, *kwargs.values())))
        if not any(isinstance(one, FakeTensor) for one in tensors) and torch.device(kwargs.get("device") or "cpu") != DEVICE:
            return _on_the_host(func, args, kwargs)
        if func is ATTENTION:
            assert all(isinstance(one, FakeTensor) for one in tensors), f"attention over two devices in {place()}"
            return self.pretend(_on_the_host(func, *held((args, kwargs))))
        if _composite(func):  # what it is made of comes here again
            with self:
                return func.decompose(*args, **kwargs)
        if func is aten.copy_.default and isinstance(args[0], FakeTensor) != isinstance(args[1], FakeTensor):
            self._wait(func)
            _on_the_host(func, held(args), kwargs)
            return args[0]
        if func in READS:
            self._wait(func)
            return _on_the_host(func, *held((args, kwargs)))
        if func in INDEXED and not all(isinstance(one, FakeTensor) for one in args[1] if one is not None):
            self._wait(func)  # an index on the host is copied first
        return self._both(func, args, kwargs)

    def _both(self, func: Any, args: Any, kwargs: Any) -> Any:
        """On the device, where FakeTensor sees to it that all tensors lie there, and beside it on the CPU."""
        fake = func(*args, **kwargs)
        args, kwargs = held((args, kwargs))
        if func is aten.histc.default:  # which the CPU has for floats only
            args = (args[0].float(), *args[1:])
        actual = _on_the_host(func, args, kwargs | {"device": torch.device("cpu")} if "device" in kwargs else kwargs)
        for one, other in zip(_tensors((fake,)), _tensors((actual,)), strict=True):
            assert one.shape == other.shape, f"{func} of {place()} gives {one.shape}, and {other.shape} on the CPU"
            one.held = other if other.dtype == one.dtype else other.to(one.dtype)  # type: ignore[attr-defined]
        return fake

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """`to` in all its forms."""
        names = [argument.name for argument in func._schema.arguments]
        said = dict(zip(names, args, strict=False)) | kwargs
        tensor, like = said["self"], said.get("other")
        copied = {"dtype": said.get("dtype") or (tensor.dtype if like is None else like.dtype)}
        target = said.get("device") or (tensor.device if like is None else like.device)
        there = isinstance(tensor, FakeTensor)
        if there == (torch.device(target).type == DEVICE.type):
            if copied["dtype"] == tensor.dtype and not said.get("copy") and func is not aten._to_copy.default:
                return tensor
            return (self._both if there else _on_the_host)(aten._to_copy.default, (tensor,), copied)
        found = _on_the_host(aten._to_copy.default, (held(tensor),), copied)
        if not said.get("non_blocking"):
            self._wait(func)
        elif there:  # nobody may look at it before the device has been waited for
            with unset_fake_temporarily():
                self._under_way.append((found, found.clone()))
                found.fill_(-1)
        return found if there else self.pretend(found)

    def _wait(self, func: Any) -> None:
        self.waits.append(f"{place()} {func}")
        with unset_fake_temporarily():
            for told, value in self._under_way:
                told.copy_(value)
        self._under_way = []

    def read(self, tensor: FakeTensor) -> Any:
        self._wait("tolist")
        with unset_fake_temporarily(), torch._C.DisableTorchFunction():
            return tensor.held.tolist()  # type: ignore[attr-defined]

    def pretend(self, tensor: Tensor) -> FakeTensor:
        """A tensor on the device that holds a given one."""
        with unset_fake_temporarily(), torch.inference_mode(tensor.is_inference()), self.fakes:
            fake: Any = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=DEVICE)
        fake.held = tensor
        return fake

    def take(self, model: nn.Module) -> None:
        moved: dict[int, Any] = {}
        for module in model.modules():
            for name, one in module._parameters.items():
                if one is not None and id(one) not in moved:
                    moved[id(one)] = nn.Parameter(self.pretend(one.data), requires_grad=False)
                    moved[id(one)].held = one.data
                module._parameters[name] = one if one is None else moved[id(one)]
            for name, one in module._buffers.items():
                module._buffers[name] = one if one is None else self.pretend(one)


REPLACED = {
    Tensor.copy_: aten.copy_.default,
    Tensor.contiguous: aten.contiguous.default,
    Tensor.__invert__: torch.bitwise_not,
    Tensor.__int__: aten.item.default,
}


class Indexing(TorchFunctionMode):
    """x[...], x[...] = y and the like in operators: torch's own way to them asks a CUDA build, even for a fake tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not args or not isinstance(args[0], FakeTensor):
            return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__:
            part, indices = _taken(*args)
            return part if indices is None else aten.index.Tensor(part, indices)
        if func is Tensor.__setitem__:
            (part, indices), value = _taken(*args[:2]), args[2]
            if indices is not None:
                value = value if isinstance(value, Tensor) else torch.full((), value, dtype=part.dtype, device=part.device)
                return aten.index_put_.default(part, indices, value)
            return aten.copy_.default(part, value) if isinstance(value, Tensor) else part.fill_(value)
        return REPLACED.get(func, func)(*args, **(kwargs or {}))


def _taken(tensor: Tensor, index: Any) -> tuple[Tensor, list[Tensor | None] | None]:
    """What numbers, slices, None and ... take of a tensor, and the tensors among the indices by dimension, None for none."""
    index = list(index) if isinstance(index, tuple) else [index]
    for here in [place for place, one in enumerate(index) if one is ...]:
        index[here : here + 1] = [slice(None)] * (tensor.ndim - sum(one is not None for one in index) + 1)
    dim, found = 0, {}
    for one in index:
        if one is None:
            tensor = aten.unsqueeze.default(tensor, dim)
        elif isinstance(one, slice):
            whole = one == slice(None)
            tensor = tensor if whole else aten.slice.Tensor(tensor, dim, one.start, one.stop, one.step or 1)
        elif isinstance(one, (Tensor, list)):
            found[dim] = one if isinstance(one, Tensor) else torch.tensor(one)
        else:
            tensor, dim = aten.select.int(tensor, dim, int(one)), dim - 1
        dim += 1
    return tensor, [found.get(place) for place in range(max(found) + 1)] if found else None


@cache
def _composite(func: Any) -> bool:
    return func._can_decompose()


def _on_the_host(func: Any, args: Any, kwargs: Any) -> Any:
    with unset_fake_temporarily():
        return func(*args, **kwargs)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors among the arguments or results of an operator."""
    for one in values:
        if isinstance(one, Tensor):
            yield one
        elif isinstance(one, (list, tuple)):
            yield from _tensors(one)


def held(tree: Any) -> Any:
    """With what fake tensors hold in the place of them."""
    if isinstance(tree, FakeTensor):
        return tree.held  # type: ignore[attr-defined]
    if isinstance(tree, (list, tuple)):
        return [held(one) for one in tree]
    return {key: held(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def place() -> str:
    """The line of skipstone that is being run."""
    frame: Any = sys._getframe(1)
    while frame is not None and "/skipstone/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename.rsplit('/skipstone/', 1)[1]}:{frame.f_lineno}"


@contextmanager
def pretended() -> Iterator[Pretended]:
    """A `Pretended` that is entered. No tensor of it is left in the project's caches afterwards."""
    device = Pretended()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_stream", lambda device=None: object())
        patch.setattr(torch.cuda, "Event", lambda enable_timing=False: mock.Mock(elapsed_time=lambda _: 1.0))  # milliseconds
        patch.setattr(FakeTensor, "tolist", lambda tensor: device.read(tensor))  # its own reads number by number
        patch.setattr(choose_engine, "refuse_weights", lambda model: None)  # which wants plain tensors
        try:
            with device.fakes, device, Indexing():
                yield device
        finally:
            host_transfer.cached_arange.cache_clear()
            draft._nothing.cache_clear()
