"""Plain decoding, one token per pass: the baseline of every measurement and the oracle of every test."""

from dataclasses import dataclass
from typing import ClassVar

from skipstone.decoding.draft import Draft
from skipstone.decoding.method import Method
from skipstone.decoding.session import Session
from skipstone.models.layered import LayeredModel


@dataclass(frozen=True)
class Autoregressive(Method):
    """A session whose draft is always empty."""

    name: ClassVar[str] = "autoregressive"

    def start(self, model: LayeredModel, rows: int, capacity: int) -> Session:
        return PlainSession(model, rows, capacity)


class PlainSession(Session):
    """Every step scores the last committed token and commits one."""

    def draft(self, limit: list[int]) -> Draft:
        return Draft.empty(self.rows, self.root.device, self.frontier([0] * self.rows))
