"""When a stream of shares has changed for the worse."""

from __future__ import annotations


class Cusum:
    """Has the task changed? A one-sided CUSUM (Page, Biometrika 1954) on the share of accepted drafts, over blocks of steps.

    Its reference is the mean since it was armed. DRIFT: a loss of less is none. ALARM: at which sum it says so.
    """

    DRIFT, ALARM, BLOCK, ARMED = 0.05, 4.0, 8, 32

    def __init__(self) -> None:
        self._block: list[tuple[float, float]] = []
        self._total, self._blocks, self._sum = 0.0, 0, 0.0

    def add(self, share: float, weight: float = 1.0) -> bool:
        """One step's share, and of how many drafts. Returns whether the task has changed; it starts anew then."""
        self._block.append((share * weight, weight))
        if len(self._block) < self.BLOCK:
            return False
        value = sum(right for right, _ in self._block) / sum(weight for _, weight in self._block)
        self._block.clear()
        if self._blocks >= self.ARMED:
            self._sum = max(0.0, self._sum + self._total / self._blocks - value - self.DRIFT)
        self._total, self._blocks = self._total + value, self._blocks + 1
        if self._sum > self.ALARM:
            self.__init__()
            return True
        return False
