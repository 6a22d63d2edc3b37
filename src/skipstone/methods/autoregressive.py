"""Plain decoding, one token per pass: the baseline of all measurements and the reference of all tests."""

from dataclasses import dataclass
from typing import ClassVar

from skipstone.decoding.drafter import Drafter, NoDrafter
from skipstone.decoding.method import Method
from skipstone.engines.model_runner import ModelRunner


@dataclass(frozen=True)
class Autoregressive(Method):
    """Plain decoding: drafts nothing."""

    name: ClassVar[str] = "autoregressive"

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return NoDrafter()
