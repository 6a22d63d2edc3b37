"""torch's default dtype and device while transformers' modules compute: nobody changes them meanwhile.

Some modules of transformers create tensors without a dtype or device of their own. While transformers builds a model, it sets
the default dtype of the whole process, for all threads.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils

Given = ParamSpec("Given")
Result = TypeVar("Result")
_CREATE = (torch.tensor, torch.full, torch.zeros, torch.ones, torch.empty, torch.linspace)


class _DefaultsLock:
    """Passes run next to each other; a change of the defaults waits for the passes under way, and new passes wait for it.

    A pass enters itself first and then looks for changes. A change announces itself first and then looks for passes. So one
    sees the other, and a pass takes no lock where nothing changes.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.num_changes = 0
        self.passes: list[int] = []  # their threads; a list's methods are atomic

    def begin_pass(self) -> None:
        thread = threading.get_ident()
        self.passes.append(thread)
        while self.num_changes and self.passes.count(thread) == 1:  # a pass inside of a pass does not wait
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
        own = {threading.get_ident()}  # a thread does not wait for itself, also not for a pass that Ctrl-C has left unended
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
_loading = threading.Lock()  # two loads at a time would restore each other's default dtype


def _forget() -> None:
    """In a forked child, where the other threads and their passes are gone."""
    global _turns, _loading
    _turns, _loading = _DefaultsLock(), threading.Lock()


os.register_at_fork(after_in_child=_forget)


class _Float32Mode(TorchFunctionMode):
    """For one thread, new tensors of floats are float32 where they name no dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        created = func(*args, **(kwargs or {}))
        if func in _CREATE and (kwargs or {}).get("dtype") is None and created.dtype is torch.get_default_dtype():
            return func(*args, **{**(kwargs or {}), "dtype": torch.float32})
        return created


class stable_defaults:
    """Inside, no load changes torch's default dtype, and a tensor that names no dtype or device is as where nobody has set a
    default: in float32 and on the CPU."""

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


def with_stable_defaults(function: Callable[Given, Result]) -> Callable[Given, Result]:
    """A function that runs under `stable_defaults`."""

    @wraps(function)
    def guarded(*given: Given.args, **named: Given.kwargs) -> Result:
        with stable_defaults():
            return function(*given, **named)

    return guarded


@contextmanager
def loading() -> Iterator[None]:
    """For `from_pretrained`, one load at a time. Only the part that changes the default dtype, which builds the modules without
    weights, waits for passes and holds them up. A default device does not decide where the weights go."""
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
