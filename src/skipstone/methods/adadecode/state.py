"""What AdaDecode knows about a model across requests: its heads, how often every exit predicts and is right, which exits are
worth a test.

Costs are in plain steps. Only steps whose text cannot depend on it (greedy, or coupled draws) follow what was learnt.
"""

from __future__ import annotations

import threading
import time
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

from skipstone.decoding.draft import RowVerdict
from skipstone.methods.adadecode.heads import ExitHeads
from skipstone.methods.shared.guard import PROBE, Guard
from skipstone.models.layered import LayeredModel

if TYPE_CHECKING:
    from skipstone.methods.adadecode.adadecode import AdaDecode

LOSS = 0.02
"""Share of time that may be lost on trials of what does not pay."""
SHARPER, MOST_THRESHOLD, RELAX, MANY_REJECTED = 0.5, 0.99, 1024, 0.05
"""What is left of 1 - threshold where drafting does not pay, the highest threshold, the steps after which one lower is tried
again, and the share of rejected predictions from which on they may be to blame."""
FEW_TESTS, FORGET, EXPLORE, TIMED = 32, 1 / 64, 16, 5
"""Tests before an exit is judged, the weight of its latest one, one step of so many that tests every exit,
and tests that are timed."""


@dataclass
class Tally:
    """Of one exit. tests: how often it was asked; predicted: how often it was sure; what became of those predictions (those
    behind a rejected one are neither). rate: tests that ended in a prediction, lately."""

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
    """See the module. exits: (number of the head, layer) of every candidate. threshold: as it is now."""

    def __init__(self, method: AdaDecode, model: LayeredModel, heads: ExitHeads, rows: int = 1) -> None:
        self.method, self.heads, self.depth = method, heads, model.depth
        wanted = method.exit_layers or heads.card.layers
        self.exits = [(index, layer) for index, layer in enumerate(heads.card.layers) if layer in wanted]
        self.tallies = {layer: Tally() for _, layer in self.exits}
        self.lock = threading.RLock()
        self.guard, self.threshold, self.raised = Guard(LOSS), method.threshold, 0
        self.steps = self.drafted_steps = self.turns = self.tests = self._since = 0
        self.test_seconds = _timed(model, heads, rows) if method.guard else 0.0
        self.passes: dict[tuple[int, int, int], int] = {}
        self._judged = self._wrong = 0
        self._useless: set[int] = set()

    @property
    def test_cost(self) -> float:
        """Of one test, in plain steps; nothing before one of those was clocked."""
        return min(self.test_seconds / median(self.guard.plain), 1.0) if self.guard.plain else 0.0

    def another_text(self) -> None:
        """A request begins."""
        with self.lock:
            self.guard.another_text()

    def room(self, most: int) -> int:
        """How many early predictions the next step may make, 0 to `most`."""
        with self.lock:
            if not self.method.guard or not self.exits:
                return most
            return self.guard.room(most, PROBE * (self.exits[0][1] / self.depth + self.test_cost))

    def worth_testing(self) -> list[tuple[int, int]]:
        """The exits that pay for their tests by what they save up to the next one; in one step of EXPLORE all."""
        with self.lock:
            self.turns += 1
            return self.exits if self.turns % EXPLORE == 0 else self._paying()

    def _paying(self) -> list[tuple[int, int]]:
        if not self.method.guard:
            return self.exits
        kept: list[tuple[int, int]] = []
        above = self.depth
        for index, layer in reversed(self.exits):
            tally = self.tallies[layer]
            lost = kept[-1][1] if kept else layer  # what a wrong one lets the token behind it run in vain
            saved = tally.rate * (tally.right * (above - layer) - (1 - tally.right) * lost) / self.depth
            if tally.tests < FEW_TESTS or saved >= self.test_cost:
                kept.insert(0, (index, layer))
                above = layer
        return kept

    def tested(self, layer: int, predicted: list[bool]) -> None:
        """Take over one test, one entry for each row that was asked."""
        with self.lock:
            self.tests += 1
            for one in predicted:
                self.tallies[layer].test(one)

    def learn(
        self,
        exits: list[list[int]],
        verdicts: list[RowVerdict],
        passes: list[tuple[int, int, int]],
        seconds: float | None,
    ) -> None:
        """Take over what became of a step. exits: of every row, the layers that its drafts were predicted at. seconds: that it
        took; None where the guard is not to know of it."""
        with self.lock:
            for of_row, verdict in zip(exits, verdicts, strict=True):
                for layer in of_row[: len(verdict.path)]:
                    self.tallies[layer].accepted += 1
                self._judged += len(verdict.path)
                if verdict.tokens and not verdict.finished and len(verdict.path) < len(of_row):
                    self.tallies[of_row[len(verdict.path)]].rejected += 1
                    self._judged += 1
                    self._wrong += 1
            for one in passes:
                self.passes[one] = self.passes.get(one, 0) + 1
            drafted = any(exits)
            self.steps += 1
            self.drafted_steps += drafted
            if seconds is not None:
                self._judge(verdicts, passes, seconds, drafted)

    def _judge(self, verdicts: list[RowVerdict], passes: list[tuple[int, int, int]], seconds: float, drafted: bool) -> None:
        live = [verdict for verdict in verdicts if verdict.tokens]
        tokens = sum(len(verdict.tokens) for verdict in live) / max(len(live), 1)
        expected = sum(high - low for low, high, _ in passes) / self.depth
        tried = expected > 1 or drafted or len(passes) > 1  # also in vain
        factor = self.guard.clocked(max(expected, 1.0), seconds, plain=not tried)
        self.guard.learn(tokens, factor * max(expected, 1.0), tried)
        self._since += 1
        worth = self.guard.worth()
        if useless := {layer for _, layer in self.exits} - {layer for _, layer in self._paying()} - self._useless:
            self._useless |= useless
            self._change(self.threshold)  # what was lost and rejected there says nothing of the others
        elif worth is not None and worth < 1 and self.threshold < MOST_THRESHOLD and self._rejected() >= MANY_REJECTED:
            self._change(min(1 - SHARPER * (1 - self.threshold), MOST_THRESHOLD))
            self.raised += 1
        elif self._since >= RELAX and self.threshold > self.method.threshold:
            self._change(max(1 - (1 - self.threshold) / SHARPER, self.method.threshold))

    def _rejected(self) -> float:
        """Share of the predictions judged at this threshold that were rejected."""
        return self._wrong / self._judged if self._judged else 0.0

    def _change(self, threshold: float) -> None:
        self.threshold, self._since = threshold, 0
        self._judged = self._wrong = 0
        self.guard.another_set()

    def report(self) -> dict[str, Any]:
        """Plain JSON values. passes: (from layer, to layer, tokens, how often)."""
        with self.lock:
            return {
                "threshold": self.threshold,
                "raised": self.raised,
                "steps": self.steps,
                "drafted_steps": self.drafted_steps,
                "pays": self.guard.pays(),
                "tests": self.tests,
                "test_cost": self.test_cost if self.method.guard else None,
                "tested": [layer for _, layer in self._paying()],
                "exits": {str(layer): asdict(tally) for layer, tally in self.tallies.items()},
                "passes": [[*one, count] for one, count in sorted(self.passes.items())],
            }

    def remark(self) -> str | None:
        """What a user should know: that the heads do not pay here."""
        with self.lock:
            if not self.method.guard or self.guard.pays() or not self.raised:
                return None
            judged = sum(tally.accepted + tally.rejected for tally in self.tallies.values())
            wrong = sum(tally.rejected for tally in self.tallies.values())
            return (
                f"adadecode's early predictions do not pay here: {wrong} of {judged} were rejected; its threshold rose from "
                f"{self.method.threshold:g} to {self.threshold:g}, and it decodes plainly but for trials"
            )


@torch.inference_mode()
def _timed(model: LayeredModel, heads: ExitHeads, rows: int) -> float:
    """Seconds of one test of so many rows: the median of TIMED, on an accelerator as well."""
    ids = torch.zeros((rows, 1), dtype=torch.int64, device=model.device)
    hidden, taken = model.embed(ids, ids), []
    for _ in range(TIMED + 1):
        began = time.perf_counter()
        heads.logits(model, 0, hidden)[:, 0].softmax(-1).amax(-1).tolist()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])
