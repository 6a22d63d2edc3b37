"""Random numbers as a pure function of (seed of the row, position, stream): no state, so nothing about a row's draws depends
on its neighbours, on the schedule, or on how often something was drawn before.

The generator is SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014) over a hashed key and a counter, in int64 arithmetic
that wraps around alike on every device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TARGET = 0  # the draw that decides the token at a position (plain, recovered, bonus, and both sides of a coupled draw)
ACCEPT = 1  # Leviathan's acceptance test
DRAFT = 2  # the drafter's own draw
STREAMS = 3


def substream(stream: int, offset: int) -> int:
    """The stream of the token `offset` places after the last committed one.

    A position that is drafted again after a rejection has another offset, hence fresh noise: a rule for the draft length that
    looks at discarded drafts (an adaptive threshold) cannot bias the output.
    """
    return stream + STREAMS * offset


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)
_STREAM = _signed(0xD6E8FEB86659FD93)


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical right shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def uniform(seed: Tensor, position: Tensor, stream: int, size: int = 1) -> Tensor:
    """Uniform numbers in the open interval (0, 1).

    seed: [B] int64. position: [B] int64. Returns [B, size] float64.
    """
    offset = _signed((stream + 1) * (_GOLDEN % (1 << 64)) % (1 << 64))
    key = _mix(_mix(seed + _GOLDEN) ^ (position * _STREAM + offset))
    counter = torch.arange(1, size + 1, device=seed.device) * _GOLDEN
    bits = _shift(_mix(_mix(key)[:, None] + counter), 12)  # 52 bits: with 53 the largest plus a half rounds up to 1
    return (bits.double() + 0.5) * 2.0**-52


@dataclass(frozen=True)
class Noise:
    """The draws of a batch. seed: [B] int64. Tests replace it by one that enumerates every outcome with its weight."""

    seed: Tensor

    def draw(self, p: Tensor, position: Tensor, stream: int) -> Tensor:
        """Sample from p [B, V] (need not be normalised) by the Gumbel-max trick; a one-hot row gives its token. Returns [B]."""
        u = uniform(self.seed, position, stream, p.shape[-1])
        # argmax(log p - log(-log u)) = argmin(-log u / p): an exponential race, 0 where p is 0
        return (p.double() / -u.log()).argmax(-1)

    def accept(self, probability: Tensor, position: Tensor, stream: int) -> Tensor:
        """Bernoulli draws. probability: [B], values above 1 count as 1. Returns [B] bool."""
        return uniform(self.seed, position, stream).squeeze(1) < probability
