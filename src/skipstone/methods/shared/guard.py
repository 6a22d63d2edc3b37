"""Where a method that learns (SWIFT, AdaDecode) drafts at all, and what it may try. All costs are in plain steps.

Drafting goes on as long as its latest steps brought more tokens than plain steps would have in the same time, by the clock.
Where they did not, single steps draft as probes, each failure doubling the wait for the next; a success is enough to draft on
until what it brought is lost. What is not known to pay (probes, evaluations, timings) is paid from a slack that plain decoding
and good drafts build up: an allowance, a share of the plain steps that the tokens would have taken, and START plain steps. What
is tried goes beyond it by one step or pass at most.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

START, MOST_SLACK = 6.0, 64.0
"""What may be lost at first, and most slack that is kept."""
RECENT, LATELY, LEAST_LATELY, MOST_WAIT, PROBE = 12, 64, 24, 16, 3
"""Latest drafting steps that decide; that tell what one way of drafting is worth, at most and at least; most plain steps
between two probes, and most drafts of a probe."""
SEVERAL, GAIN = 4, 1.05
"""So many latest steps that brought so much go on without any slack (after timings, which spend it at once)."""
PLAIN, LEAST_PLAIN, REFRESH, SPIKE, UNLIKE = 8, 3, 48, 3.0, 1.25
"""Plain steps that are remembered, and needed to compare with; one of so many steps is one, where drafting pays. What takes
so many times what was expected was something else's doing, and counts as so much. A plain step of another request is unlike
that of the last one from so many times on."""


class Guard:
    """See the module. allowance: share of time that may be lost now. plain: seconds of the latest plain steps."""

    def __init__(self, allowance: float) -> None:
        self.allowance, self.slack = allowance, START
        self.plain: deque[float] = deque(maxlen=PLAIN)
        self.another_set()
        self._steps, self._factor, self._unsure = 0, 1.0, False

    def another_text(self) -> None:
        """A request begins, where plain steps may cost something else: one at least is made anew, as many as at first where
        that one is unlike the last request's."""
        while len(self.plain) >= LEAST_PLAIN:
            self.plain.popleft()
        self._unsure = True

    def another_set(self) -> None:
        """Drafts are made in another way from now on (other sublayers, another threshold): nothing is known of them."""
        self.recent: deque[tuple[float, float]] = deque(maxlen=RECENT)
        self.wait = self.waited = 1
        self.lately: deque[tuple[float, float]] = deque(maxlen=LATELY)

    def pays(self) -> bool:
        """Whether the latest steps that drafted were worth it."""
        return _speed(self.recent) > 1

    def gains(self) -> bool:
        """Whether they brought so much, several of them, that they need no slack: they build it up."""
        return len(self.recent) >= SEVERAL and _speed(self.recent) >= GAIN

    def worth(self) -> float | None:
        """what drafting lately brought in this way, as a speed-up, probes among it; None before LEAST_LATELY steps."""
        return _speed(self.lately) if len(self.lately) >= LEAST_LATELY else None

    def room(self, most: int, cost: float) -> int:
        """How many drafts the next step may make, 0 to `most`. cost: of a probe of PROBE drafts that are all rejected."""
        if len(self.plain) < LEAST_PLAIN:
            return 0
        if self.pays() and (self.slack >= 0 or self.gains()):
            return most if self._steps % REFRESH else 0
        return min(most, PROBE) if self.probes() and (self.affords(cost) or self.pays()) else 0

    def probes(self) -> bool:
        """Whether it is time for a probe: where drafting does not pay, or hardly pays and the slack is spent."""
        return self.waited >= (MOST_WAIT if self.pays() else self.wait) and len(self.plain) >= LEAST_PLAIN

    def affords(self, cost: float) -> bool:
        """Whether there is slack for something that may be in vain; what is dearer than all of it must be possible, too."""
        return self.slack >= min(cost, MOST_SLACK / 2)

    def lose(self, cost: float) -> None:
        """Take something from the slack."""
        self.slack -= cost

    def clocked(self, expected: float, seconds: float | None, plain: bool) -> float:
        """By the clock, how many times what was expected a step cost. seconds: None where nobody could look; then the latest
        step that drafted speaks for this one."""
        if plain:
            if seconds is not None:
                if self._unsure and self.plain and not 1 / UNLIKE < seconds / median(self.plain) < UNLIKE:
                    self.plain.clear()
                self._unsure = False
                self.plain.append(min(seconds, SPIKE * median(self.plain)) if self.plain else seconds)
            return 1.0
        if seconds is not None and self.plain:
            self._factor = min(self.in_plain(seconds) / expected, SPIKE)
        return self._factor

    def in_plain(self, seconds: float) -> float:
        """Seconds in plain steps; there must have been one."""
        return seconds / median(self.plain)

    def learn(self, tokens: float, cost: float, drafted: bool) -> None:
        """Take over what a step brought, and what it cost."""
        self._steps += 1
        self.slack = min(self.slack + (1 + self.allowance) * tokens - cost, MOST_SLACK)
        if not drafted:
            self.waited += 1
            return
        if tokens > cost and not self.pays():
            self.recent.clear()
        self.recent.append((tokens, cost))
        self.wait, self.waited = 1 if tokens > cost else min(2 * self.wait, MOST_WAIT), 0
        self.lately.append((tokens, cost))


def _speed(steps: Sequence[tuple[float, float]]) -> float:
    """Tokens a plain step of time, of (tokens, cost); 0 for none."""
    tokens, cost = (sum(column) for column in zip(*steps, strict=True)) if steps else (0.0, 1.0)
    return tokens / cost
