"""What AdaDecode knows about a model across requests: its heads, how often every exit predicts and is right, which exits are
worth a test, and whether predicting pays (`Payoff`).

Every cost is in plain steps. Only steps whose text cannot depend on it (greedy, or coupled draws) follow what was learnt.
"""

from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from skipstone.decoding.draft import RowVerdict
from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.methods.shared.payoff import PROBE, Payoff
from skipstone.models.frontier import Frontier
from skipstone.models.kvstore import KVStore
from skipstone.models.layered import LayeredModel

LOSS = 0.02  # share of time that may be lost on trials
SHARPER = 0.5  # what is left of 1 - threshold when the threshold rises
MOST_THRESHOLD = 0.99  # the highest threshold that it rises to
RELAX = 1024  # steps after which a risen threshold is lowered again
MANY_REJECTED = 0.05  # share of rejected predictions from which on they may be why drafting does not pay
LEAST_TESTS = 32  # tests before an exit is judged
FORGET = 1 / 64  # weight of the latest test in an exit's rate of predictions
EXPLORE = 16  # steps, one of which tests every exit
TIMED = 5  # tests that are timed, and passes with and without one
SHORT_PASS = 0.02  # seconds of a pass from which on stopping for a test on its way costs next to nothing beside the test


@dataclass
class Tally:
    """Of one exit. tests: how often it was asked. predicted: how often it was sure. accepted, rejected: what became of those
    predictions; those behind a rejected one are neither. rate: share of the latest tests that ended in a prediction."""

    tests: int = 0
    predicted: int = 0
    accepted: int = 0
    rejected: int = 0
    rate: float = 0.0

    def test(self, predicted: bool) -> None:
        """Take over one test."""
        self.tests += 1
        self.predicted += predicted
        self.rate += max(FORGET, 1 / self.tests) * (predicted - self.rate)

    @property
    def right(self) -> float:
        """Share of the judged predictions that were accepted; at first, before any, 1."""
        return (self.accepted + 1) / (self.accepted + self.rejected + 1)


class ExitState:
    """See the module. layers: the candidates; none for all of the heads'. threshold: at first, and never less. guard: False
    keeps the threshold, drafts at every step and tests every exit. rows: of the batch. shortlist: [S], the ids that heads pick
    from; None for all.

    exits: (number of the head, layer) of every candidate.
    """

    def __init__(
        self,
        model: LayeredModel,
        heads: ExitHeads,
        layers: tuple[int, ...],
        threshold: float,
        guard: bool,
        rows: int = 1,
        shortlist: Tensor | None = None,
    ) -> None:
        self.heads, self.depth = heads, model.depth
        wanted = layers or heads.card.layers
        self.exits = [(index, layer) for index, layer in enumerate(heads.card.layers) if layer in wanted]
        self.tallies = {layer: Tally() for _, layer in self.exits}
        self.payoff = Payoff(LOSS, guard)
        self.threshold = self.least_threshold = threshold
        self.raised = 0  # times that the threshold rose
        self.steps = self.drafted_steps = self.tests = self.stops = self._turns = 0
        self.test_seconds, self.stop_seconds = _timed(model, heads, rows, self.exits[-1:], shortlist) if guard else (0.0, 0.0)
        self.passes: dict[tuple[int, int, int], int] = {}  # (from layer, to layer, tokens) -> how often
        self._steps_here = self._judged = self._rejected = 0  # steps, judged and rejected predictions at this threshold
        self._useless: set[int] = set()  # layers that were found not worth their tests
        self._paying: list[tuple[int, int]] | None = None  # exits that pay for their tests; None where it is to be found out

    @property
    def test_cost(self) -> float:
        """Of one test, in plain steps; nothing before one of those was clocked."""
        return self._cost(self.test_seconds)

    @property
    def stop_cost(self) -> float:
        """Of a stop on the way up for a test, which is a part of it, in plain steps; 0 before one of those was clocked."""
        return self._cost(self.stop_seconds)

    def _cost(self, seconds: float) -> float:
        return min(self.payoff.in_plain_steps(seconds), 1.0) if self.payoff.plain_seconds else 0.0

    def most_drafts(self, limit: int) -> int:
        """How many early predictions the next step may make, 0 to `limit`."""
        return self.payoff.most_drafts(limit, PROBE * (self.exits[0][1] / self.depth + self.test_cost)) if self.exits else limit

    def worth_testing(self) -> list[tuple[int, int]]:
        """The exits that pay for their tests by what they save up to the next one; in one step of EXPLORE all."""
        self._turns += 1
        return self.exits if self._turns % EXPLORE == 0 else self.paying

    @property
    def paying(self) -> list[tuple[int, int]]:
        """The exits that pay for their tests, as far as is known."""
        if not self.payoff.enabled:
            return self.exits
        if self._paying is None:
            self._paying = self._find_paying()
        return self._paying

    def _find_paying(self) -> list[tuple[int, int]]:
        kept: list[tuple[int, int]] = []
        above, stop_cost = self.depth, self.stop_cost
        for index, layer in reversed(self.exits):
            tally = self.tallies[layer]
            in_vain = kept[-1][1] if kept else layer  # layers that the token behind a wrong prediction runs for nothing
            saved = tally.rate * (tally.right * (above - layer) - (1 - tally.right) * in_vain) / self.depth
            if tally.tests < LEAST_TESTS or saved >= stop_cost:
                kept.insert(0, (index, layer))
                above = layer
        return kept

    def tested(self, layer: int, predicted: list[bool], stopped: bool = True) -> None:
        """Take over one test, one entry for each row that was asked. stopped: whether the layers were stopped for it."""
        self.tests += 1
        self.stops += stopped
        self._paying = None
        for one in predicted:
            self.tallies[layer].test(one)

    def record(
        self, exits: list[list[int]], verdicts: list[RowVerdict], passes: list[tuple[int, int, int]], seconds: float | None
    ) -> None:
        """Take over what became of a step. exits: of every row, the layers that its drafts were predicted at. seconds: that it
        took; None where it did not follow what was learnt, and nothing is to follow from it."""
        for of_row, verdict in zip(exits, verdicts, strict=True):
            for layer in of_row[: len(verdict.path)]:
                self.tallies[layer].accepted += 1
            self._judged += len(verdict.path)
            if verdict.tokens and not verdict.finished and len(verdict.path) < len(of_row):
                self.tallies[of_row[len(verdict.path)]].rejected += 1
                self._judged += 1
                self._rejected += 1
        for one in passes:
            self.passes[one] = self.passes.get(one, 0) + 1
        drafted = any(exits)
        self.steps += 1
        self.drafted_steps += drafted
        self._paying = None
        if seconds is not None:
            live = [len(verdict.tokens) for verdict in verdicts if verdict.tokens]
            expected = sum(high - low for low, high, _ in passes) / self.depth
            tried = expected > 1 or drafted or len(passes) > 1  # also in vain
            cost = max(expected, 1.0)
            self.payoff.record(sum(live) / max(len(live), 1), self.payoff.clock(cost, seconds, tried) * cost, tried)
            self._move_threshold()

    def _move_threshold(self) -> None:
        """Up, where drafting does not pay and predictions are rejected; down again after a while. An exit that turns out
        useless gives the others a new start: what was lost and rejected there says nothing of them."""
        self._steps_here += 1
        speedup, wrong = self.payoff.speedup(), self._rejected / max(self._judged, 1)
        if useless := {layer for _, layer in self.exits} - {layer for _, layer in self.paying} - self._useless:
            self._useless |= useless
            self._begin_at(self.threshold)
        elif speedup is not None and speedup < 1 and self.threshold < MOST_THRESHOLD and wrong >= MANY_REJECTED:
            self._begin_at(min(1 - SHARPER * (1 - self.threshold), MOST_THRESHOLD))
            self.raised += 1
        elif self._steps_here >= RELAX and self.threshold > self.least_threshold:
            self._begin_at(max(1 - (1 - self.threshold) / SHARPER, self.least_threshold))

    def _begin_at(self, threshold: float) -> None:
        self.threshold = threshold
        self._steps_here = self._judged = self._rejected = 0
        self.payoff.forget_drafts()

    def report(self) -> dict[str, Any]:
        """Plain JSON values. passes: "from layer, to layer, tokens" -> how often."""
        return {
            "threshold": self.threshold,
            "raised": self.raised,
            "steps": self.steps,
            "drafted_steps": self.drafted_steps,
            "pays": self.payoff.pays(),
            "tests": self.tests,
            "stops": self.stops,
            "test_cost": self.test_cost if self.payoff.enabled else None,
            "stop_cost": self.stop_cost if self.payoff.enabled else None,
            "tested": [layer for _, layer in self.paying],
            "exits": {str(layer): asdict(tally) for layer, tally in self.tallies.items()},
            "passes": {"{}, {}, {}".format(*one): count for one, count in sorted(self.passes.items())},
        }

    def remark(self) -> str | None:
        """What a user should know: that the heads do not pay here."""
        if not self.payoff.enabled or self.payoff.pays() or not self.raised:
            return None
        rejected = sum(tally.rejected for tally in self.tallies.values())
        judged = rejected + sum(tally.accepted for tally in self.tallies.values())
        return (
            f"adadecode's early predictions do not pay here: {rejected} of {judged} were rejected; its threshold rose from "
            f"{self.least_threshold:g} to {self.threshold:g}, and it decodes plainly but for trials"
        )


@torch.inference_mode()
def _timed(
    model: LayeredModel, heads: ExitHeads, rows: int, exits: list[tuple[int, int]], shortlist: Tensor | None
) -> tuple[float, float]:
    """Seconds of (one test of so many rows, a stop for one on the way up), medians of TIMED, on an accelerator as well. The
    engine's own where it tests by itself. exits: one, or none where nothing is stopped for."""
    by_engine = heads.linear and model.engine.chains and model.engine_picks
    root, store = torch.zeros(rows, dtype=torch.int64, device=model.device), KVStore(rows, model.depth, 1, model.kv_dtype)

    def test(hidden: Tensor) -> float:
        began = model.ranks.now()
        if by_engine:
            model.engine.exit_picks(hidden[:, -1], heads.transform(0), shortlist)[1].tolist()
        else:
            heads.logits(model, 0, hidden, shortlist)[:, 0].softmax(-1).amax(-1).tolist()
        return model.ranks.since(began)

    def way_up(stop: int | None) -> float:
        began = model.ranks.now()
        frontier = Frontier(model, store, root, [True] * rows, [0] * rows)
        if stop is not None:
            frontier.advance(stop)
            test(frontier.hidden[:, -1:])
        frontier.advance(frontier.top)
        model.likeliest(frontier.hidden).tolist()
        return model.ranks.since(began)

    hidden = model.embed(root[:, None], root[:, None])
    seconds = median([test(hidden) for _ in range(TIMED + 1)][1:])
    if not exits or min(way_up(None), way_up(None)) > SHORT_PASS:
        return seconds, seconds
    stop = exits[0][1]
    pairs = [(way_up(stop), way_up(None)) for _ in range(TIMED)]
    return seconds, max(seconds, median(stopped - whole for stopped, whole in pairs))
