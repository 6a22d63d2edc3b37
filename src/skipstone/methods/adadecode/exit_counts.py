"""AdaDecode's statistics on a model across requests: predictions of every exit, and passes."""

from dataclasses import asdict, dataclass
from typing import Any

from skipstone.decoding.draft import RowVerdict
from skipstone.utils.limits import SMALL_STATE_BYTES


@dataclass
class ExitCounts:
    """Counts of one exit. tests: tokens tested. predicted: tests above the threshold. accepted, rejected: verified predictions;
    predictions after a rejected one count as neither."""

    tests: int = 0
    predicted: int = 0
    accepted: int = 0
    rejected: int = 0


class AdaDecodeCounts:
    """Counts of all steps. exits: layer -> counts of its exit. tests: number of tests, each of one or several rows. stops:
    number of tests between two passes. passes: (from layer, to layer, tokens) -> number of passes."""

    def __init__(self, layers: list[int]) -> None:
        self.exits = {layer: ExitCounts() for layer in layers}
        self.steps = self.drafted_steps = self.tests = self.stops = 0
        self.passes: dict[tuple[int, int, int], int] = {}

    @property
    def nbytes(self) -> int:
        return SMALL_STATE_BYTES

    def tested(self, layer: int, predicted: list[bool], stopped: bool = True) -> None:
        """Count one test. predicted: for each tested row whether it predicts. stopped: whether the test ended a pass."""
        self.tests += 1
        self.stops += stopped
        self.exits[layer].tests += len(predicted)
        self.exits[layer].predicted += sum(predicted)

    def record(self, exits: list[list[int]], verdicts: list[RowVerdict], passes: list[tuple[int, int, int]]) -> None:
        """Count the results of a step. exits: per row, the layers that predicted its drafts."""
        for layers, verdict in zip(exits, verdicts, strict=True):
            for layer in layers[: len(verdict.path)]:
                self.exits[layer].accepted += 1
            if verdict.tokens and not verdict.finished and len(verdict.path) < len(layers):
                self.exits[layers[len(verdict.path)]].rejected += 1
        for key in passes:
            self.passes[key] = self.passes.get(key, 0) + 1
        self.steps += 1
        self.drafted_steps += any(exits)

    def report(self) -> dict[str, Any]:
        """Plain JSON values. passes: "from layer, to layer, tokens" -> number."""
        return {
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "tests": self.tests,
            "stops": self.stops,
            "exits": {str(layer): asdict(tally) for layer, tally in self.exits.items()},
            "passes": {"{}, {}, {}".format(*key): count for key, count in sorted(self.passes.items())},
        }
