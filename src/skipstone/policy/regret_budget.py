"""The time that `auto` may lose against plain decoding. No drafter and no wrong estimate can lose more.

A conservative policy in the sense of Wu, Shariff, Lattimore and Szepesvari (ICML 2016): exploration is paid from savings.
All amounts are in plain steps.
"""

from dataclasses import dataclass

SLACK = 0.015  # share of plain decoding's time that may be lost: default of the setting `slack`
CREDIT = 4.0  # plain steps that may be lost before anything was won, until their time is known
CREDIT_SECONDS = 0.005  # the same in seconds: half of the 10 ms that the first answer of a process may take longer
CREDIT_STEPS = 0.75  # in addition, if a gain is expected: a first draft of a copy in int4; with SLACK 4 % of 30 tokens' time
REQUEST_CREDIT = 12.0  # plain steps that a request may lose of others' savings: with 4, hard beginnings end drafting (docs/lab)
MAX_BALANCE = 32.0  # plain steps that are saved at most: twenty failed drafting steps, or one step of an expensive drafter


@dataclass(slots=True)
class RegretBudget:
    """Two accounts, of all requests and of the running one. Both must cover a step.

    Every token adds `slack`, and every step is charged its time minus its tokens. A step is taken only if `remaining` covers
    its loss without an accepted draft. So after every step

        charged time <= (1 + slack) tokens + credit         over all requests,
        charged time <= (1 + slack) tokens + REQUEST_CREDIT over the running one,

    plus the excess of the last step over its expected time. The credit is that of `set_credit`. The first bound
    also holds over any part of the text, with MAX_BALANCE instead of the credit.
    """

    slack: float = SLACK
    overall: float = CREDIT
    request: float = REQUEST_CREDIT

    def begin_request(self) -> None:
        self.request = REQUEST_CREDIT

    def set_credit(self, plain_seconds: float, *, expects_gain: bool) -> None:
        """Replace CREDIT by CREDIT_SECONDS. plain_seconds: of a plain step. expects_gain: there are CREDIT_STEPS more, for a
        drafter that was faster than plain decoding in an earlier process."""
        self.overall += min(expects_gain * CREDIT_STEPS + CREDIT_SECONDS / plain_seconds, REQUEST_CREDIT) - CREDIT

    def charge(self, time: float, tokens: float) -> None:
        """Charges steps that took this time and committed these tokens (of a batch: the mean of its rows)."""
        gain = (1 + self.slack) * tokens - time
        self.overall = min(self.overall + gain, MAX_BALANCE)
        self.request += gain

    @property
    def remaining(self) -> float:
        """The loss that the next step may cause."""
        return min(self.overall, self.request)

    def steps_until(self, amount: float, max_steps: int) -> int:
        """Plain steps until `remaining` covers an amount, at least 1 and at most max_steps."""
        missing = amount - self.remaining
        return max_steps if missing >= max_steps * self.slack else max(1, int(missing / self.slack) + 1)
