"""Random numbers as a pure function of (seed of the row, position, stream): no state, so nothing about a row's draws depends
on its neighbours, on the schedule, or on how often something was drawn before.

The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014): a row's hashed seed is where its counter starts, place, position
and stream move it by one large odd step each, the finaliser turns it into bits. int64 wraps around alike on every device.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from skipstone.models import host

TARGET = 0  # the draw that decides the token at a position (plain, recovered, bonus, and both sides of a coupled draw)
ACCEPT = 1  # Leviathan's acceptance test
DRAFT = 2  # the drafter's own draw
STREAMS = 3  # how many there are


Index = TypeVar("Index", int, Tensor)


def substream(stream: int, offset: Index) -> Index:
    """The stream of the token `offset` places after the last committed one.

    A position that is drafted again after a rejection has another offset, hence fresh noise: a rule for the draft length that
    looks at discarded drafts (an adaptive threshold) cannot bias the output.
    """
    return stream + STREAMS * offset


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_PLACE = _signed(0x9E3779B97F4A7C15)  # steps of the counter: to the next number of a draw, ...
_POSITION = _signed(0xD6E8FEB86659FD93)  # ... to the next position, ...
_STREAM = _signed(0xDA942042E4DD58B5)  # ... to the next stream; any odd constants without a pattern
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)
_SCALE = 2.0**-64 * (1 - 2.0**-52)


def _folded(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits), the shift logical."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(x)


def _mix(x: Tensor) -> Tensor:
    x = _folded(x, 30).mul_(_MIX1)
    x = _folded(x, 27).mul_(_MIX2)
    return _folded(x, 31)


def _unit(bits: Tensor) -> Tensor:
    """Hashed int64 -> float64 in the open interval (0, 1): the scale keeps the ends half a step away."""
    return bits.double().mul_(_SCALE).add_(0.5)


def row_seed(seed: int, row: int) -> int:
    """The seed of a row of a batch, in [0, 2^63).

    Row 0 has the call's own seed. Every further row has one hashed from (seed, row), so that two calls with neighbouring
    seeds share no row.
    """
    if row == 0:
        return seed % (1 << 63)
    hashed = _mix(_mix(torch.tensor([_signed(seed % (1 << 64))]) + _PLACE) + _signed(row * _PLACE % (1 << 64)))  # [1] int64
    return int(hashed) % (1 << 63)


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
    def _start(self) -> Tensor:
        return _mix(self.seed + _PLACE)[:, None]

    def _counter(self, position: Tensor, stream: int | Tensor) -> Tensor:
        """Where the counter of a draw begins. position: [B, k]. stream: an int or [k]. Returns [B, k] int64."""
        offset = stream * _STREAM if isinstance(stream, Tensor) else _signed(stream * _STREAM % (1 << 64))
        return self._start + (position * _POSITION + offset)

    def uniform(self, position: Tensor, stream: int, size: int) -> Tensor:
        """[B, size] float64 in (0, 1). position: [B]."""
        places = torch.arange(size, device=self.seed.device) * _PLACE
        return _unit(_mix(self._counter(position[:, None], stream) + places))

    def race(self, p: Tensor, position: Tensor, stream: int) -> Tensor:
        """The Gumbel-max trick before its argmax, argmax(log p - log(-log u)) = argmax(log u / p): an exponential race, whose
        order is a draw without replacement, -inf where p is 0. p: [B, V], need not be normalised. Returns [B, V] float64."""
        return self.uniform(position, stream, p.shape[-1]).log_() / p

    def draw(self, p: Tensor, position: Tensor, stream: int) -> Tensor:
        """Sample from p [B, V] (need not be normalised); a one-hot row gives its token. Returns [B]."""
        if p.shape[0] == 1 and host.readable(p):  # nobody who cannot win need run
            runners = p[0].nonzero().T  # [1, k]
            if not runners.shape[1]:
                return torch.zeros_like(position)
            uniform = _unit(_mix(self._counter(position[:, None], stream) + runners * _PLACE))
            return runners[0, (uniform.log_() / p[0, runners]).argmax(-1)]
        return self.race(p, position, stream).argmax(-1)

    def accept(self, probability: Tensor, position: Tensor, stream: int | Tensor) -> Tensor:
        """Bernoulli draws. probability: [B, k], values above 1 count as 1. position: [B, k]. stream: an int or [k].
        Returns [B, k] bool."""
        return _unit(_mix(self._counter(position, stream))) < probability
