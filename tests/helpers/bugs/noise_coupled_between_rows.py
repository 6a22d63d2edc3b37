"""All rows draw from the same noise."""

from __future__ import annotations

from dataclasses import replace

from skipstone.decoding.request import Request
from skipstone.decoding.session import Session
from tests.helpers.bugs.base import broken


class Broken(Session):
    def admit(self, row: int, request: Request, known: int = 0) -> None:
        super().admit(row, replace(request, sampling=replace(request.sampling, seed=7)), known)


METHOD = broken(session=Broken)
