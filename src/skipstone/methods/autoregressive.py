"""Plain decoding, one token per pass: the baseline of every measurement and the oracle of every test."""

from dataclasses import dataclass
from typing import ClassVar

from skipstone.decoding.drafter import Drafter, NoDrafter
from skipstone.decoding.method import Method
from skipstone.models.layered import LayeredModel


@dataclass(frozen=True)
class Autoregressive(Method):
    """A method whose draft is always empty."""

    name: ClassVar[str] = "autoregressive"

    def create_drafter(self, model: LayeredModel, rows: int, capacity: int) -> Drafter:
        return NoDrafter()
