"""Early exit without correction: the output is g(x_E). It is lossy and exists for measurements.

LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding (Elhoushi et al., ACL 2024, arXiv 2404.16710),
section 4.2, Tables 1-6 and 11. Its reference is the model with only its first E layers.
"""

from dataclasses import dataclass
from typing import ClassVar

from skipstone.decoding.drafter import Drafter, NoDrafter
from skipstone.decoding.method import Method
from skipstone.decoding.settings import check_exit_layer, setting
from skipstone.engines.model_runner import ModelRunner


@dataclass(frozen=True)
class EarlyExit(Method):
    """Early exit without correction: the first E layers decode alone."""

    name: ClassVar[str] = "early_exit"
    by_model: ClassVar[tuple[str, ...]] = ("exit_layer",)
    aliases: ClassVar[dict[str, str]] = {"assistant_early_exit": "exit_layer"}

    exit_layer: int | None = setting(None, "E, the number of layers that run; 1 <= E < L.")

    @property
    def lossless(self) -> bool:
        return False

    def check(self, model: ModelRunner) -> None:
        super().check(model)
        check_exit_layer(self.exit_layer, model)

    @property
    def target_depth(self) -> int | None:
        return self.exit_layer

    def create_drafter(self, model: ModelRunner, rows: int, capacity: int) -> Drafter:
        return NoDrafter()
