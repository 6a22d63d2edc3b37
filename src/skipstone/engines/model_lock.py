"""Calls on one model take turns: the lock of a model."""

import os
from _thread import RLock
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

from skipstone.models.decoder_model import unwrapped

_RLOCK: Any = RLock  # typeshed calls it final; CPython's may be subclassed, and its `__exit__` cannot be interrupted by Ctrl-C


class ModelLock(_RLOCK):
    """Held by the thread that prepares a model or takes a decoding step with it, and never across a `yield`.

    It is re-entrant. After a release, waiting threads come first, so that texts advance step by step.

    passes: held for single passes, also by steps of another model that this one drafts for. Whoever holds it waits for nothing.
    """

    def __init__(self) -> None:
        super().__init__()
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
