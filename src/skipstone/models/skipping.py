"""Sublayers left out of a pass: for the thread that runs it, and for no other.

A module's forward is replaced by one that asks its thread whether it is to be skipped, while any thread skips it; the last one
puts back what was there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Forward = Callable[..., Any]


@dataclass(frozen=True)
class SkipSet:
    """Sublayers to leave out of a pass: indices of layers whose attention, and whose MLP, contributes nothing."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()


def no_attention(hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    """An attention that adds nothing to the residual stream, and stores no keys and values."""
    return torch.zeros_like(hidden_states), None


def unchanged(hidden_states: Tensor) -> Tensor:
    """A module on the way to one that adds nothing."""
    return hidden_states


@dataclass
class _Replaced:
    """A module whose forward is replaced. previous: an instance's own, if it had one. users: threads that skip it now."""

    module: nn.Module
    previous: Forward | None
    users: int = 0


_lock = threading.Lock()
_replaced: dict[int, _Replaced] = {}
_mine = threading.local()


@contextmanager
def instead(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Run modules by other forwards in this thread until the block ends."""
    for module in forwards:
        _enter(module)
    before: dict[int, Forward] = getattr(_mine, "forwards", {})
    _mine.forwards = {**before, **{id(module): forward for module, forward in forwards.items()}}
    try:
        yield
    finally:
        _mine.forwards = before
        for module in forwards:
            _leave(module)


def _enter(module: nn.Module) -> None:
    key = id(module)
    with _lock:
        if key not in _replaced:
            previous = module.__dict__.get("forward")
            if getattr(previous, "passing", False):  # another thread's for the length of its pass: as good as none
                previous = None
            own: Forward = previous or type(module).forward.__get__(module)

            def forward(*given: Any, **more: Any) -> Any:
                return getattr(_mine, "forwards", {}).get(key, own)(*given, **more)

            _replaced[key] = _Replaced(module, previous)
            module.forward = forward
        _replaced[key].users += 1


def _leave(module: nn.Module) -> None:
    with _lock:
        entry = _replaced[id(module)]
        entry.users -= 1
        if entry.users:
            return
        del _replaced[id(module)]
        if entry.previous is None:
            module.__dict__.pop("forward", None)
        else:
            module.forward = entry.previous
