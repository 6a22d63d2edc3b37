"""LayerSkip with another drafter or another session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from skipstone.decoding.session import Session
from skipstone.methods.layerskip import LayerSkip, LayerSkipDrafter
from skipstone.models.layered import LayeredModel


def broken(drafter: type[LayerSkipDrafter] = LayerSkipDrafter, session: type[Session] = Session) -> LayerSkip:
    """A method whose drafters and sessions are of these classes; right where they are LayerSkip's own."""
    odd = drafter if drafter is not LayerSkipDrafter else session

    @dataclass(frozen=True)
    class Method(LayerSkip):
        name: ClassVar[str] = odd.__module__.rpartition(".")[2]

        def create_drafter(self, model: LayeredModel, rows: int, capacity: int) -> LayerSkipDrafter:
            return drafter(self, model, rows)

        def start(self, model: LayeredModel, rows: int, capacity: int) -> Session:
            return session(model, rows, capacity, self.create_drafter(model, rows, capacity))

    return Method(exit_layer=2, num_speculative_tokens=3)
