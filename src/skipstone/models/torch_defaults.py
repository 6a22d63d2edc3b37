"""Keeps torch's default dtype and device stable while transformers' modules compute.

Some modules of transformers create tensors without naming a dtype or device. While transformers builds a model, it sets the
default dtype of the whole process, for all threads.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

Given = ParamSpec("Given")
Result = TypeVar("Result")

_CREATE = (torch.tensor, torch.full, torch.zeros, torch.ones, torch.empty, torch.linspace)


class _DefaultsLock:
    """Lets passes run in parallel. A change of the defaults waits for running passes, and new passes wait for the change.

    A pass registers itself first and then checks for changes. A change registers itself first and then checks for passes. So
    one always sees the other, and a pass takes no lock unless something changes.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.num_changes = 0
        self.passes: list[int] = []  # their threads; a list's methods are atomic

    def begin_pass(self) -> None:
        thread = threading.get_ident()
        self.passes.append(thread)
        while self.num_changes and self.passes.count(thread) == 1:  # a nested pass does not wait
            self.end_pass()
            with self.condition:
                self.condition.wait_for(lambda: not self.num_changes)
            self.passes.append(thread)

    def end_pass(self) -> None:
        self.passes.remove(threading.get_ident())
        if self.num_changes:
            with self.condition:
                self.condition.notify_all()

    @contextmanager
    def a_change(self) -> Iterator[None]:
        own = {threading.get_ident()}  # a thread never waits for its own pass, which Ctrl-C may have interrupted
        with self.condition:
            self.num_changes += 1
        try:
            with self.condition:
                self.condition.wait_for(lambda: set(self.passes) <= own)
            yield
        finally:
            with self.condition:
                self.num_changes -= 1
                self.condition.notify_all()


_turns = _DefaultsLock()
_loading = threading.Lock()  # parallel loads would restore each other's default dtype


def _forget() -> None:
    """Reset the locks in a forked child, which has no other threads."""
    global _turns, _loading
    _turns, _loading = _DefaultsLock(), threading.Lock()


os.register_at_fork(after_in_child=_forget)


class _Float32Mode(TorchFunctionMode):
    """Makes new float tensors of one thread float32 if they name no dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        created = func(*args, **(kwargs or {}))
        if func in _CREATE and (kwargs or {}).get("dtype") is None and created.dtype is torch.get_default_dtype():
            return func(*args, **{**(kwargs or {}), "dtype": torch.float32})
        return created


class stable_defaults:
    """Inside, no load changes torch's default dtype. New tensors that name no dtype or device are float32 on the CPU."""

    __slots__ = ("_modes", "_turns")

    def __enter__(self) -> None:
        self._turns, self._modes = _turns, None
        self._turns.begin_pass()
        modes: list[Any] = []
        if torch._C._len_torch_function_stack() and torch.get_default_device().type != "cpu":  # a default device is a mode
            modes.append(torch.device("cpu"))
        if torch.get_default_dtype() is not torch.float32:
            modes.append(_Float32Mode())
        if modes:
            self._modes = ExitStack()
            for mode in modes:
                self._modes.enter_context(mode)

    def __exit__(self, *_: object) -> None:
        if self._modes is not None:
            self._modes.close()
        self._turns.end_pass()

    def __call__(self, function: Callable[Given, Result]) -> Callable[Given, Result]:
        """Decorate a function to run inside."""

        @wraps(function)
        def guarded(*given: Given.args, **named: Given.kwargs) -> Result:
            with stable_defaults():
                return function(*given, **named)

        return guarded


@contextmanager
def loading() -> Iterator[None]:
    """Serialise calls of `from_pretrained`. Passes are blocked only while it changes the default dtype to build modules without
    weights. A default device has no effect on the weights."""
    from transformers import modeling_utils

    with _loading, torch.device("cpu"):
        original: Any = modeling_utils.local_torch_dtype

        @contextmanager
        def in_turn(*given: Any, **named: Any) -> Iterator[None]:
            with _turns.a_change(), original(*given, **named):
                yield

        modeling_utils.local_torch_dtype = in_turn
        try:
            yield
        finally:
            modeling_utils.local_torch_dtype = original
