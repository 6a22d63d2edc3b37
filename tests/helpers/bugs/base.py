"""LayerSkip with another session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from skipstone.decoding.session import Session
from skipstone.methods.layerskip import LayerSkip, LayerSkipSession
from skipstone.models.layered import LayeredModel


def broken(session: type[LayerSkipSession]) -> LayerSkip:
    """A method whose sessions are of that class; right where the class is LayerSkip's own."""

    @dataclass(frozen=True)
    class Method(LayerSkip):
        name: ClassVar[str] = session.__module__.rpartition(".")[2]

        def start(self, model: LayeredModel, rows: int, capacity: int, state: Any = None) -> Session:
            return session(self, model, rows, capacity)

    return Method(exit_layer=2, num_speculative_tokens=3)
