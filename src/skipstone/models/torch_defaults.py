"""torch's default dtype and device while transformers' modules compute: nobody changes them meanwhile.

Some modules of transformers create tensors without a dtype or device of their own. While transformers builds a model, it sets
the default dtype of the whole process, for all threads.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode
from transformers import modeling_utils

Given = ParamSpec("Given")
Result = TypeVar("Result")
_CREATE = (torch.tensor, torch.full, torch.zeros, torch.ones, torch.empty, torch.linspace)


class _Turns:
    """Passes run next to each other; a change of the defaults waits for the passes under way, and new passes wait for it."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.num_passes = self.num_changes = 0
        self.own = threading.local()  # depth: passes that this thread is inside of

    @contextmanager
    def a_pass(self) -> Iterator[None]:
        depth = getattr(self.own, "depth", 0)
        if not depth:
            with self.condition:
                self.condition.wait_for(lambda: not self.num_changes)
                self.num_passes += 1
        self.own.depth = depth + 1
        try:
            yield
        finally:
            self.own.depth = depth
            if not depth:
                with self.condition:
                    self.num_passes -= 1
                    self.condition.notify_all()

    @contextmanager
    def a_change(self) -> Iterator[None]:
        with self.condition:
            self.num_changes += 1
            try:
                self.condition.wait_for(lambda: not self.num_passes)
            except BaseException:
                self.num_changes -= 1
                self.condition.notify_all()
                raise
        try:
            yield
        finally:
            with self.condition:
                self.num_changes -= 1
                self.condition.notify_all()


_turns = _Turns()
_loading = threading.Lock()  # two loads at a time would restore each other's default dtype


def _forget() -> None:
    """In a forked child, where the other threads and their passes are gone."""
    global _turns, _loading
    _turns, _loading = _Turns(), threading.Lock()


os.register_at_fork(after_in_child=_forget)


class _Float32(TorchFunctionMode):
    """For one thread, new tensors of floats are float32 where they name no dtype."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        created = func(*args, **(kwargs or {}))
        if func in _CREATE and (kwargs or {}).get("dtype") is None and created.dtype is torch.get_default_dtype():
            return func(*args, **{**(kwargs or {}), "dtype": torch.float32})
        return created


@contextmanager
def stable_defaults() -> Iterator[None]:
    """Inside, no load changes torch's default dtype, and a tensor that names no dtype or device is as where nobody has set a
    default: in float32 and on the CPU."""
    with _turns.a_pass():
        device = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
        dtype = nullcontext() if torch.get_default_dtype() is torch.float32 else _Float32()
        with device, dtype:
            yield


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
