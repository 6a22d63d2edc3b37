"""Does drafting pay here, and what may be tried? The feedback controller of the methods that learn while they decode.

Every cost is in plain steps: one is the time of a step of plain decoding with the same model, machine and batch.

1. Drafting goes on while the latest steps that drafted brought more tokens than plain steps would have in the same time.
2. Where they did not, single steps draft as probes, and each failure doubles the wait for the next one. A success is enough to
   draft on until what it brought is lost.
3. What is not known to pay (probes, evaluations of a search, timings) is paid from a slack. Plain steps and good drafts build
   it up, as a share of the plain steps that their tokens would have taken. A trial overdraws it by one step or pass at most.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median

FIRST_SLACK = 6.0  # plain steps of slack at first
MOST_SLACK = 64.0  # plain steps of slack that are kept at most
RECENT = 12  # drafting steps that decide whether drafting pays
SPEEDUP_STEPS = 64  # drafting steps that tell the speed-up of one way to draft, at most
LEAST_SPEEDUP_STEPS = 24  # drafting steps that tell it, at least
PROBE = 3  # tokens that a probe drafts at most
MOST_WAIT = 16  # plain steps between two probes at most
GAIN_STEPS = 4  # recent drafting steps that are needed for a clear gain
GAIN = 1.05  # their speed-up from which on the gain is clear
MOST_PLAIN = 8  # plain steps whose seconds are remembered
LEAST_PLAIN = 3  # plain steps that must be clocked before a drafting step is compared with them
REFRESH = 48  # steps, one of which is plain, where drafting pays
SPIKE = 3.0  # times its expected time that a step or pass may count as; more was the doing of something else
UNLIKE = 1.25  # ratio of their times from which on the plain steps of two texts are unlike


class Payoff:
    """The accounts of one method on one model.

    loss_share: the share of time that may be lost on trials, from now on. enabled: False lets every step draft, as papers do;
    the accounts are kept all the same.
    """

    def __init__(self, loss_share: float, enabled: bool = True) -> None:
        self.loss_share, self.enabled = loss_share, enabled
        self.slack = FIRST_SLACK
        self.plain_seconds: deque[float] = deque(maxlen=MOST_PLAIN)
        self._plain_step = 0.0  # seconds of a plain step, the median of those
        self._steps = 0
        self._cost_ratio = 1.0  # measured over expected cost of the latest step that drafted
        self._text_is_new = False
        self.forget_drafts()

    def begin_text(self) -> None:
        """A request begins, and its plain steps may cost something else: at least one is clocked anew, and as many as at first
        where that one is unlike those of the last request."""
        while len(self.plain_seconds) >= LEAST_PLAIN:
            self.plain_seconds.popleft()
        self._plain_step = median(self.plain_seconds) if self.plain_seconds else 0.0
        self._text_is_new = True

    def forget_drafts(self) -> None:
        """Drafts are made in another way from now on (other sublayers, another threshold), of which nothing is known."""
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT)  # (tokens, cost) of drafting steps
        self._recent_speedup = 0.0  # theirs
        self.speedup_steps: deque[tuple[float, float]] = deque(maxlen=SPEEDUP_STEPS)
        self.probe_wait = self.since_probe = 1  # plain steps before the next probe, and since the last one

    # ---------------------------------------------------------------------------------------------- what is known

    def pays(self) -> bool:
        """Whether the recent steps that drafted were worth it."""
        return self._recent_speedup > 1

    def gains(self) -> bool:
        """Whether they gain so clearly that they need no slack: they build it up."""
        return len(self.recent) >= GAIN_STEPS and self._recent_speedup >= GAIN

    def speedup(self) -> float | None:
        """The speed-up of drafting in this way, probes included; None before LEAST_SPEEDUP_STEPS steps."""
        return _speedup(self.speedup_steps) if len(self.speedup_steps) >= LEAST_SPEEDUP_STEPS else None

    # ------------------------------------------------------------------------------------------ what may be tried

    def most_drafts(self, limit: int, probe_cost: float) -> int:
        """How many tokens the next step may draft, 0 to `limit`. probe_cost: of PROBE drafts that are all rejected."""
        if not self.enabled:
            return limit
        if len(self.plain_seconds) < LEAST_PLAIN:
            return 0
        if self.pays() and (self.slack >= 0 or self.gains()):
            return limit if self._steps % REFRESH else 0
        return min(limit, PROBE) if self.probe_is_due() and (self.affords(probe_cost) or self.pays()) else 0

    def probe_is_due(self) -> bool:
        """Whether it is time for a probe, where drafting does not pay or the slack is spent."""
        return self.since_probe >= (MOST_WAIT if self.pays() else self.probe_wait) and len(self.plain_seconds) >= LEAST_PLAIN

    def affords(self, cost: float) -> bool:
        """Whether there is slack for a trial. Half of all the slack that is kept is enough for the dearest one."""
        return self.slack >= min(cost, MOST_SLACK / 2)

    def spend(self, cost: float) -> None:
        """Pay for a trial."""
        self.slack -= cost

    # ---------------------------------------------------------------------------------------------- what is learnt

    def in_plain_steps(self, seconds: float) -> float:
        """A time as a cost. At least one plain step must have been clocked."""
        return seconds / self._plain_step

    def clock(self, expected: float, seconds: float | None, drafted: bool) -> float:
        """How many times its expected cost a step had, by the clock. seconds: None where the step could not be clocked, which
        then has the ratio of the latest one that drafted."""
        if drafted:
            if seconds is not None and self.plain_seconds:
                self._cost_ratio = min(self.in_plain_steps(seconds) / expected, SPIKE)
            return self._cost_ratio
        if seconds is not None:
            ratio = self.in_plain_steps(seconds) if self.plain_seconds else 1.0
            if self._text_is_new and not 1 / UNLIKE < ratio < UNLIKE:
                self.plain_seconds.clear()
            self._text_is_new = False
            self._add_plain(min(seconds, SPIKE * self._plain_step) if self.plain_seconds else seconds)
        return 1.0

    def _add_plain(self, seconds: float) -> None:
        self.plain_seconds.append(seconds)
        self._plain_step = median(self.plain_seconds)

    def record(self, tokens: float, cost: float, drafted: bool) -> None:
        """Take over the tokens that a step brought (mean of the rows) and what it cost."""
        self._steps += 1
        self.slack = min(self.slack + (1 + self.loss_share) * tokens - cost, MOST_SLACK)
        if not drafted:
            self.since_probe += 1
            return
        if tokens > cost and not self.pays():
            self.recent.clear()
        self.recent.append((tokens, cost))
        self._recent_speedup = _speedup(self.recent)
        self.speedup_steps.append((tokens, cost))
        self.probe_wait, self.since_probe = 1 if tokens > cost else min(2 * self.probe_wait, MOST_WAIT), 0


def _speedup(steps: Sequence[tuple[float, float]]) -> float:
    """Tokens over cost of some steps; 0 for none."""
    return sum(tokens for tokens, _ in steps) / sum(cost for _, cost in steps) if steps else 0.0


class TextChange:
    """Tells when the texts have changed for the worse: a one-sided CUSUM (Page, Biometrika 1954) on the share of accepted
    drafts in blocks of steps. Its reference is the mean of all blocks since it began."""

    DRIFT = 0.05  # a loss of share that is none
    ALARM = 4.0  # summed loss of share at which the texts have changed
    BLOCK = 8  # steps in a block
    ARMED = 32  # blocks before a loss counts

    def __init__(self) -> None:
        self._block: list[tuple[float, float]] = []  # (accepted, judged drafts) of each step
        self._total, self._blocks, self._loss = 0.0, 0, 0.0

    def add(self, share: float, weight: float = 1.0) -> bool:
        """Take over a step's share, which is one of `weight` drafts. Returns whether the texts have changed; then it begins
        anew."""
        self._block.append((share * weight, weight))
        if len(self._block) < self.BLOCK:
            return False
        value = sum(right for right, _ in self._block) / sum(weight for _, weight in self._block)
        self._block.clear()
        if self._blocks >= self.ARMED:
            self._loss = max(0.0, self._loss + self._total / self._blocks - value - self.DRIFT)
        self._total, self._blocks = self._total + value, self._blocks + 1
        if self._loss > self.ALARM:
            self.__init__()
            return True
        return False
