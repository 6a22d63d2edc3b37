"""What AdaDecode has seen on a model across requests: how often every exit predicts and is right, and which passes it made."""

from dataclasses import asdict, dataclass
from typing import Any

from skipstone.decoding.draft import RowVerdict
from skipstone.utils.limits import SMALL_STATE_BYTES


@dataclass
class ExitCounts:
    """Of one exit. tests: how often it was asked. predicted: how often it was sure. accepted, rejected: what became of those
    predictions; those behind a rejected one are neither."""

    tests: int = 0
    predicted: int = 0
    accepted: int = 0
    rejected: int = 0


class AdaDecodeCounts:
    """Counts of all steps. exits: layer -> of its exit. tests: of all exits, of one row or several. stops: for how many of them
    the layers were stopped on the way up. passes: (from layer, to layer, tokens) -> how often."""

    def __init__(self, layers: list[int]) -> None:
        self.exits = {layer: ExitCounts() for layer in layers}
        self.steps = self.drafted_steps = self.tests = self.stops = 0
        self.passes: dict[tuple[int, int, int], int] = {}

    @property
    def nbytes(self) -> int:
        return SMALL_STATE_BYTES

    def tested(self, layer: int, predicted: list[bool], stopped: bool = True) -> None:
        """Take over one test, one entry for each row that was asked. stopped: whether the layers were stopped for it."""
        self.tests += 1
        self.stops += stopped
        self.exits[layer].tests += len(predicted)
        self.exits[layer].predicted += sum(predicted)

    def record(self, exits: list[list[int]], verdicts: list[RowVerdict], passes: list[tuple[int, int, int]]) -> None:
        """Take over what became of a step. exits: of every row, the layers that its drafts were predicted at."""
        for of_row, verdict in zip(exits, verdicts, strict=True):
            for layer in of_row[: len(verdict.path)]:
                self.exits[layer].accepted += 1
            if verdict.tokens and not verdict.finished and len(verdict.path) < len(of_row):
                self.exits[of_row[len(verdict.path)]].rejected += 1
        for one in passes:
            self.passes[one] = self.passes.get(one, 0) + 1
        self.steps += 1
        self.drafted_steps += any(exits)

    def report(self) -> dict[str, Any]:
        """Plain JSON values. passes: "from layer, to layer, tokens" -> how often."""
        return {
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "tests": self.tests,
            "stops": self.stops,
            "exits": {str(layer): asdict(tally) for layer, tally in self.exits.items()},
            "passes": {"{}, {}, {}".format(*one): count for one, count in sorted(self.passes.items())},
        }
