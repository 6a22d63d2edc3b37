"""What decoding has cost more than plain decoding would have: the account that no drafter, and no wrong estimate, may overdraw.

A conservative policy in the sense of Wu, Shariff, Lattimore & Szepesvari (ICML 2016): what is tried is paid from what was won.
Times are in plain steps.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

SLACK = 0.015
"""Share of plain decoding's time that may be lost."""
CREDIT = 4.0
"""Plain steps that may be lost before anything was won, over all requests: what it takes to look at four drafters or so."""
REQUEST_CREDIT = 12.0
"""The same in one request, as far as others have won it. Texts begin with what is hard to foretell, and a request that has to
win back what it lost there drafts no more before it ends: with a credit of 4 such requests were the slowest of all
(docs/methods/auto.md)."""
WINDOW = 1400.0
"""Tokens after which an entry of the account of all requests counts 1/e: what was won long ago is not spent today."""


class Account(NamedTuple):
    """debt: time taken minus the time that plain decoding takes for the same tokens. plain: that time."""

    debt: float = 0.0
    plain: float = 0.0

    def add(self, time: float, tokens: float, keep: float = 1.0) -> "Account":
        """Another step. keep: share that older entries still count."""
        return Account(self.debt * keep + time - tokens, self.plain * keep + tokens)

    def room(self, slack: float, credit: float) -> float:
        """What may still be lost."""
        return slack * self.plain + credit - self.debt

    def repriced(self, before: "Account", factor: float) -> "Account":
        """What was added since it was `before` took its time at plain steps that were thought to be `factor` times as short."""
        time = max(self.debt - before.debt + self.plain - before.plain, 0.0)
        return Account(self.debt - time * (1 - 1 / factor), self.plain)


@dataclass(frozen=True, slots=True)
class Ledger:
    """The account of all requests, which forgets, and that of the running one, which does not: of what was won in one request
    no more than REQUEST_CREDIT is lost in the next.

    While neither is overdrawn a step may draft; otherwise it is plain, and plain steps lose nothing, so that both come back.
    For any drafter and any estimate a request therefore takes at most

        (1 + slack) x plain + REQUEST_CREDIT + what the first plain step behind a draft loses,

    as no draft is longer than what is left pays for (`control.decide`), and all of them (1 + slack) x plain + CREDIT,

    beside what `learning.observe` does not count: a first step's cold caches, and one stall in so many tokens.
    """

    slack: float = SLACK
    overall: Account = Account()
    request: Account = Account()

    def begin(self) -> "Ledger":
        """A request begins."""
        return Ledger(self.slack, self.overall)

    def add(self, time: float, tokens: float) -> "Ledger":
        """A step took so long, in plain steps, and committed so many tokens (of a batch: the mean of its rows)."""
        keep = 1 - min(tokens / WINDOW, 1.0)
        return Ledger(self.slack, self.overall.add(time, tokens, keep), self.request.add(time, tokens))

    def repriced(self, before: "Ledger", tokens: float, factor: float) -> "Ledger":
        """Plain steps have been taking `factor` times as long as was thought since the ledger was `before`, so many tokens ago
        in the same request."""
        keep = math.exp(-tokens / WINDOW)
        faded = Account(before.overall.debt * keep, before.overall.plain * keep)
        return Ledger(self.slack, self.overall.repriced(faded, factor), self.request.repriced(before.request, factor))

    @property
    def room(self) -> float:
        """What may still be lost."""
        return min(self.overall.room(self.slack, CREDIT), self.request.room(self.slack, REQUEST_CREDIT))

    @property
    def overdrawn(self) -> bool:
        """Whether the next step has to be plain."""
        return self.room < 0

    def steps_until(self, room: float) -> float:
        """Plain steps until so much may be lost."""
        missing = room - self.room
        return missing / self.slack if self.slack else math.inf
