"""Which sublayers a pass leaves out."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SkipSet:
    """Sublayers to leave out of a pass: indices of layers whose attention, and whose MLP, contributes nothing."""

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()
