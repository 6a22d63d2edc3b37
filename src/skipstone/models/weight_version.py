"""Detects whether the weights of a model have changed. No other file decides this.

torch counts the operations that write into a tensor (`_version`), and a tensor's storage says where its values are. Two changes
show in neither. torch reports them to hooks: the steps of fused optimizers, and modules that were exchanged and put back, which
is how PEFT merges adapters. Writes through `.data`, numpy or a storage are not seen; `refresh` reports them.
"""

import os
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_module_registration_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

_MARK = "_skipstone_written"
"""The attribute of a tensor that holds the number of the last reported write into it."""
_PLAIN = (Tensor, nn.Parameter)
"""Classes of tensors that have an address."""
_STORAGE_ADDRESS, _WRITES = attrgetter("_cdata"), attrgetter("_version")
_LOCK = RLock()
if hasattr(os, "register_at_fork"):  # another thread may hold it, and would not exist in the child to release it
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release)


class ModelVersion(NamedTuple):
    """modules: number of changes of a model's modules or parameters. weights: of its weights, including those."""

    modules: int
    weights: int


class _WriteCounter:
    """Writes that torch does not count but reports. count: so far, in this process."""

    count = 0

    @classmethod
    def report(cls, tensors: Iterable[Tensor]) -> None:
        """Mark tensors as written."""
        with _LOCK:
            for one in tensors:
                setattr(one, _MARK, cls.count + 1)
            cls.count += 1  # last, so that a reader of the count finds all marks


class TensorValues:
    """The values that some tensors held when this was made. It keeps neither the tensors nor their memory alive."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        _listen()
        # the address of a storage is not given to another one while it is held weakly
        self._storages = [StorageWeakRef(one.untyped_storage()) for one in tensors]
        self._addresses = [one.cdata for one in self._storages]
        self._writes = _WriteCounter.count
        self._are_plain = all(type(one) in _PLAIN and not one.is_inference() for one in tensors)
        self._state = self._current(tensors)

    def are_in(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors hold the same values, as far as can be seen."""
        addresses = [*map(_STORAGE_ADDRESS, map(Tensor.untyped_storage, tensors))]
        if addresses != self._addresses or self._state != self._current(tensors):
            return False
        writes = _WriteCounter.count
        if self._writes == writes:
            return True
        if any(getattr(one, _MARK, 0) > self._writes for one in tensors):
            return False
        self._writes = writes
        return True

    def _current(self, tensors: Sequence[Tensor]) -> list[Any]:
        """Addresses, strides and counts of writes of tensors in these storages."""
        if self._are_plain:
            counted = addressed = tensors
        else:  # inference tensors count no writes, and tensors of other packages have no address
            counted = [one for one in tensors if not one.is_inference()]
            addressed = [one for one in tensors if type(one) in _PLAIN]
        return [[*map(Tensor.data_ptr, addressed)], [*map(Tensor.stride, tensors)], [*map(_WRITES, counted)]]


def _tensors_in(places: Sequence[dict[str, Any]]) -> list[Tensor]:
    """The tensors in some dictionaries, without those on the meta device."""
    return [one for one in chain.from_iterable(place.values() for place in places) if one is not None and not one.is_meta]


class AttributeValues:
    """Plain attributes of modules, and all buffers of some modules, with the values that they had when this was made.

    attributes: the dictionaries that have them, and their names.
    """

    def __init__(self, attributes: Sequence[tuple[dict[str, Any], str]], modules: Iterable[nn.Module] = ()) -> None:
        self._places, self._names = [place for place, _ in attributes], [name for _, name in attributes]
        self._values = [*map(dict.get, self._places, self._names)]
        self._buffers = [module._buffers for module in modules]
        self._tensors = TensorValues(_tensors_in(self._buffers))

    def are_current(self) -> bool:
        """Whether they still have these values."""
        if [*map(dict.get, self._places, self._names)] != self._values:
            return False
        return self._tensors.are_in(_tensors_in(self._buffers))


class _VersionRecord:
    """The modules and weights of a model as they were last seen, and its version. parts: ids of its modules. is_outdated: a
    change was reported since."""

    def __init__(self, model: nn.Module) -> None:
        self.version = ModelVersion(0, 0)
        self.look(model)

    def look(self, model: nn.Module) -> None:
        """Record the current state of the model."""
        parts = list(model.modules())
        self.is_outdated = False
        self.parts = {id(part) for part in parts}
        self._child_places = [part._modules for part in parts]
        self._weight_places = [part._parameters for part in parts]
        self._children = self._current_children()
        self._values = TensorValues(_tensors_in(self._weight_places))
        # an offloaded weight is another object after every pass
        found = (one for place in self._weight_places for one in place.values() if one is not None)
        self._kinds = [(0 if one.is_meta else id(one), one.dtype, one.device) for one in found]

    def compare(self, model: nn.Module) -> None:
        """Bring the version up to date. No module is walked where nothing has changed."""
        same = not self.is_outdated and self._children == self._current_children()
        if same and self._values.are_in(_tensors_in(self._weight_places)):
            return
        before = self._children, self._kinds
        self.look(model)
        modules, weights = self.version
        self.version = ModelVersion(modules + (before != (self._children, self._kinds)), weights + 1)

    def _current_children(self) -> tuple[list[Any], list[type]]:
        children = [child for place in self._child_places for child in place.values() if child is not None]
        return [*map(ref, children)], [*map(type, children)]


_SEEN: WeakKeyDictionary[nn.Module, _VersionRecord] = WeakKeyDictionary()


def model_version(model: nn.Module) -> ModelVersion:
    """The version of a model's modules and weights. Equal numbers of two calls mean that nothing has changed in between, as far
    as can be seen."""
    with _LOCK:
        seen = _SEEN.get(model)
        if seen is None:
            seen = _SEEN[model] = _VersionRecord(model)
        else:
            seen.compare(model)
        return seen.version


def keep_version(model: nn.Module) -> None:
    """Keep a model's version although other objects hold its unchanged weights now."""
    with _LOCK:
        if model in _SEEN:
            _SEEN[model].look(model)


def refresh(model: nn.Module) -> None:
    """Tell skipstone that a model's weights were changed in a way that cannot be seen.

    Such ways are `parameter.data.copy_(...)` and other operations on `.data`, numpy arrays that share memory with a parameter,
    another library's kernels, and weights that are offloaded. The next call of skipstone copies the weights again. Steps of
    torch's optimizers, `load_state_dict` and operations on the parameters themselves need no `refresh`.

    model: the model, a draft model or exit heads.
    """
    _WriteCounter.report((*model.parameters(), *model.buffers()))
    _outdate({id(part) for part in model.modules()})


def _outdate(parts: set[int]) -> None:
    """Have every model with one of these modules looked at again."""
    with _LOCK:
        for seen in _SEEN.values():
            if not seen.parts.isdisjoint(parts):
                seen.is_outdated = True


@cache
def _listen() -> None:
    """Have torch report the changes that it does not count. Changes before the first copy do not matter."""
    # a compiled step runs fused kernels outside its graphs, too; unlike torch.compiler.disable, this imports no compiler yet
    uncompiled: Any = torch._disable_dynamo(_after_step)  # type: ignore[attr-defined]
    register_optimizer_step_post_hook(uncompiled)
    register_module_module_registration_hook(_after_registration)


def _after_step(optimizer: Any, *_: Any) -> None:
    _WriteCounter.report(one for group in optimizer.param_groups for one in group["params"])


def _after_registration(parent: nn.Module, *_: Any) -> None:
    if not torch.compiler.is_compiling():  # such as slices of a list of layers, which torch.compile follows
        _outdate({id(parent)})
