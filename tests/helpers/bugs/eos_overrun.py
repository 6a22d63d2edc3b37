"""The end of a text is forgotten."""

from __future__ import annotations

from skipstone.decoding.request import Request
from skipstone.methods.layerskip import LayerSkipSession
from tests.helpers.bugs.base import broken


class Broken(LayerSkipSession):
    def admit(self, row: int, request: Request, known: int = 0) -> None:
        object.__setattr__(request, "eos", frozenset())
        super().admit(row, request, known)


METHOD = broken(Broken)
