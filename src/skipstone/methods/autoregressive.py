"""Plain decoding, one token per pass: the baseline of every measurement and the oracle of every test."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from skipstone.core.model import LayeredModel
from skipstone.core.protocol import Method
from skipstone.core.session import Session
from skipstone.core.types import Draft


@dataclass(frozen=True)
class Autoregressive(Method):
    """A session whose draft is always empty."""

    name: ClassVar[str] = "autoregressive"

    def start(self, model: LayeredModel, rows: int, capacity: int, state: Any = None) -> Session:
        return PlainSession(model, rows, capacity)


class PlainSession(Session):
    """Every step scores the last committed token and commits one."""

    def draft(self, limit: list[int]) -> Draft:
        return Draft.empty(self.rows, self.root.device, self.frontier([0] * self.rows))
