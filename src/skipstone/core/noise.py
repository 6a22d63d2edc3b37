"""Random numbers as a pure function of (seed of the row, position, stream): no state, so nothing about a row's draws depends
on its neighbours, on the schedule, or on how often something was drawn before.

The generator is SplitMix64's finaliser (Steele, Lea, Flood, OOPSLA 2014) over a hashed key and a counter, in int64 arithmetic
that wraps around alike on every device.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

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


def _key(seed: Tensor, position: Tensor, stream: int) -> Tensor:
    """One hash per row [B] of (mixed seed, position, stream)."""
    offset = _signed((stream + 1) * (_GOLDEN % (1 << 64)) % (1 << 64))
    return _mix(seed ^ (position * _STREAM + offset))


def _unit(bits: Tensor) -> Tensor:
    """Hashed int64 -> float64 in the open interval (0, 1). 52 bits: with 53 the largest plus a half rounds up to 1."""
    return (_shift(bits, 12).double() + 0.5) * 2.0**-52


def uniform(seed: Tensor, position: Tensor, stream: int, size: int = 1) -> Tensor:
    """Uniform numbers in the open interval (0, 1).

    seed: [B] int64. position: [B] int64. Returns [B, size] float64.
    """
    return Noise(seed).uniform(position, stream, size)


@dataclass(frozen=True)
class Noise:
    """The draws of a batch. seed: [B] int64. Tests replace it by one that enumerates every outcome with its weight."""

    seed: Tensor

    @cached_property
    def _mixed(self) -> Tensor:
        return _mix(self.seed + _GOLDEN)

    def uniform(self, position: Tensor, stream: int, size: int) -> Tensor:
        """[B, size] float64 in (0, 1): SplitMix64 sequences, one per row, that start at the row's key."""
        counter = torch.arange(1, size + 1, device=self.seed.device) * _GOLDEN
        return _unit(_mix(_key(self._mixed, position, stream)[:, None] + counter))

    def draw(self, p: Tensor, position: Tensor, stream: int) -> Tensor:
        """Sample from p [B, V] (need not be normalised) by the Gumbel-max trick; a one-hot row gives its token. Returns [B]."""
        u = self.uniform(position, stream, p.shape[-1])
        # argmax(log p - log(-log u)) = argmin(-log u / p): an exponential race, 0 where p is 0
        return (p / -u.log()).argmax(-1)

    def accept(self, probability: Tensor, position: Tensor, stream: int) -> Tensor:
        """Bernoulli draws. probability: [B], values above 1 count as 1. Returns [B] bool."""
        return _unit(_key(self._mixed, position, stream)) < probability
