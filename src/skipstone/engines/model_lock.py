"""How threads share models and cores: the lock of a model, torch's threads next to an engine's, and forked processes."""

import ctypes
import os
from _thread import RLock
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from skipstone.models.decoder_model import unwrapped

MAPS = Path("/proc/self/maps")  # the libraries of this process, one path at the end of a line
_RLOCK: Any = RLock  # typeshed calls it final; CPython's may be subclassed, and its `__exit__` cannot be interrupted by Ctrl-C


class ModelLock(_RLOCK):
    """Held by the thread that prepares a model or takes a decoding step with it, and never across a `yield`.

    It is re-entrant. After a release, waiting threads come first, so that texts advance step by step.

    passes: held for single passes, also by steps of another model that this one drafts for. Whoever holds it waits for nothing.
    loops: decoding loops of the model, each of which says whether it is `busy`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.loops: WeakSet[Any] = WeakSet()
        self._entrance = Lock()  # held by the thread that is next
        self.passes: Any = RLock()

    def __enter__(self) -> bool:
        owned = self._is_owned()
        try:
            if owned:
                return self.acquire()  # at once
            with self._entrance:
                return self.acquire()
        except BaseException:  # Ctrl-C before the caller's `with` knows of the lock
            if owned or self._is_owned():
                self.release()
            raise

    @property
    def has_running_requests(self) -> bool:
        """Whether a text is being written with the model. Any thread may ask."""
        try:
            return any(loop.busy for loop in self.loops)
        except RuntimeError:  # a loop has just been added
            return True

    def renew(self) -> None:
        """Make it free, in a process that was forked: whichever thread held it does not exist there."""
        self._at_fork_reinit()
        self._entrance = Lock()
        self.passes._at_fork_reinit()


_LOCKS: WeakKeyDictionary[Any, ModelLock] = WeakKeyDictionary()


def lock_of(model: Any) -> ModelLock:
    """The lock of a transformers model, with or without a PEFT wrapper."""
    inner = unwrapped(model)
    return _LOCKS.get(inner) or _LOCKS.setdefault(inner, ModelLock())


RECOGNITION_LOCK = ModelLock()
"""Held while a model is recognised. This changes its config for a while, and several models may share a config."""


def _renew_all() -> None:
    for lock in [*_LOCKS.values(), RECOGNITION_LOCK]:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)


@cache
def _openmp() -> Any:
    """The OpenMP runtime that torch has loaded; None if it cannot be found. Other packages may bring one of their own
    (scikit-learn does), so the one in torch's folder is preferred."""
    lines = MAPS.read_text().splitlines() if MAPS.exists() else []
    paths = {line.split()[-1] for line in lines if "libgomp" in line}
    own = [path for path in paths if Path(path).is_relative_to(Path(torch.__file__).parent)]
    path = next(iter(own or sorted(paths)), None)
    return None if path is None else ctypes.CDLL(path)


class SingleTorchThread:
    """Inside, torch computes on one thread for the current host thread only.

    After an operator, torch's threads spin for milliseconds on cores that the engine's threads need. `torch.set_num_threads`
    would also set the number for other host threads that first use torch meanwhile. Nothing changes if torch's OpenMP runtime
    is not found.
    """

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = torch.get_num_threads()
        if (openmp := _openmp()) is not None:
            openmp.omp_set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        if (openmp := _openmp()) is not None:
            openmp.omp_set_num_threads(self._before)


@cache
def alone_after_fork() -> None:
    """Limit torch to one thread in processes that this one forks. GNU's OpenMP would wait there forever for this process's
    threads."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
