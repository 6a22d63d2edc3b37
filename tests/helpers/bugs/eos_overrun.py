"""The end of a text is forgotten."""

from __future__ import annotations

from skipstone.decoding.request import Request
from skipstone.decoding.session import Session
from tests.helpers.bugs.base import broken


class Broken(Session):
    def admit(self, row: int, request: Request, known: int = 0) -> None:
        object.__setattr__(request, "eos", frozenset())
        super().admit(row, request, known)


METHOD = broken(session=Broken)
