"""Random numbers as a pure function of (seed of the row, position, stream). There is no state, so a row's draws do not depend
on other rows, on the schedule or on earlier draws.

The generator is SplitMix64 (Steele, Lea, Flood, OOPSLA 2014). A row's counter starts at its hashed seed. Place, position and
stream each add a large odd step, and the finaliser hashes the counter. int64 overflow is the same on every device.
"""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from skipstone.engines import greedy_tokens, host_transfer
from skipstone.utils.cached_property import cached_property

TARGET = 0  # decides the token at a position (plain, recovered, bonus, and both sides of a coupled draw)
ACCEPT = 1  # Leviathan's acceptance test
DRAFT = 2  # the drafter's own draw
STREAMS = 3  # number of streams


Index = TypeVar("Index", int, Tensor)


def substream(stream: int, offset: Index) -> Index:
    """The stream of the token `offset` places after the last committed one.

    A position that is drafted again after a rejection has another offset, and so fresh noise. Therefore rules that look at
    rejected drafts, such as an adaptive threshold, cannot bias the text.
    """
    return stream + STREAMS * offset


_WRAP = 1 << 64  # where the counter wraps around


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


PLACE = _signed(0x9E3779B97F4A7C15)  # step of the counter to the next number of a draw
_POSITION = _signed(0xD6E8FEB86659FD93)  # step to the next position
_STREAM = _signed(0xDA942042E4DD58B5)  # step to the next stream; all three are arbitrary odd constants
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)
_SCALE = 2.0**-64 * (1 - 2.0**-52)


def _folded(x: Tensor, bits: int) -> Tensor:
    """x ^ (x >> bits) with a logical shift."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(x)


def _mix(x: Tensor) -> Tensor:
    x = _folded(x, 30).mul_(_MIX1)
    x = _folded(x, 27).mul_(_MIX2)
    return _folded(x, 31)


def _mixed(x: np.ndarray) -> np.ndarray:
    """`_mix` of uint64 on the host."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX1 % _WRAP)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX2 % _WRAP)
    return x ^ (x >> np.uint64(31))


def _unit(bits: Tensor) -> Tensor:
    """Hashed int64 -> float64 in the open interval (0, 1). The scale excludes the ends."""
    return bits.double().mul_(_SCALE).add_(0.5)


def row_seed(seed: int, row: int) -> int:
    """The seed of a row of a batch, in [0, 2^63).

    Row 0 has the call's own seed. Other rows hash (seed, row), so that calls with neighbouring seeds share no row.
    """
    if row == 0:
        return seed % (1 << 63)
    start = torch.tensor([_signed(seed % (1 << 64))], dtype=torch.int64, device="cpu")
    hashed = _mix(_mix(start + PLACE) + _signed(row * PLACE % (1 << 64)))  # [1] int64
    return int(hashed) % (1 << 63)


def uniform(seed: Tensor, position: Tensor, stream: int, size: int = 1) -> Tensor:
    """Uniform numbers in the open interval (0, 1).

    seed: [B] int64. position: [B] int64. Returns [B, size] float64.
    """
    return Noise(seed).uniform(position, stream, size)


class LazyDistribution(Protocol):
    """Draws a token of every row without a distribution over the whole vocabulary."""

    def drawn(self, noise: "Noise", position: Tensor, stream: int) -> Tensor:
        """The tokens [B] that `Noise.draw` would draw from the distribution."""
        ...


@dataclass(frozen=True)
class Noise:
    """The draws of a batch. seed: [B] int64. Tests replace it with a class that enumerates all outcomes."""

    seed: Tensor

    @cached_property
    def _start(self) -> Tensor:
        return _mix(self.seed + PLACE)[:, None]

    def _counter(self, position: Tensor, stream: int | Tensor) -> Tensor:
        """The first counter of each draw. position: [B, k]. stream: an int or [k]. Returns [B, k] int64."""
        offset = stream * _STREAM if isinstance(stream, Tensor) else _signed(stream * _STREAM % (1 << 64))
        return self._start + (position * _POSITION + offset)

    def uniform(self, position: Tensor, stream: int, size: int) -> Tensor:
        """[B, size] float64 in (0, 1). position: [B]."""
        return self._uniform_at(torch.arange(size, device=self.seed.device, dtype=torch.int64), position, stream)

    def _uniform_at(self, places: Tensor, position: Tensor, stream: int) -> Tensor:
        """The numbers at some places [k] or [B, k] of a draw. Returns [B, k] float64."""
        return _unit(_mix(self._counter(position[:, None], stream) + places * PLACE))

    def race(self, p: Tensor, position: Tensor, stream: int) -> Tensor:
        """log u / p, [B, V] float64, -inf for p = 0. Its argmax is a draw from p, its order a draw without replacement.

        The Gumbel-max trick as an exponential race: argmax(log p - log(-log u)) = argmax(log u / p). p need not be
        normalised."""
        return self.uniform(position, stream, p.shape[-1]).log_() / p

    def counters(self, position: Tensor, stream: int) -> Tensor:
        """The first counter [B] int64 of every row's draw. Token v has the counter PLACE * v further."""
        if self.seed.shape[0] == 1 and host_transfer.is_on_host(self.seed):
            return torch.tensor([_signed(self._first_counter(int(position), stream))], dtype=torch.int64, device="cpu")
        return self._counter(position[:, None], stream)[:, 0]

    def draw(self, p: Tensor | LazyDistribution, position: Tensor, stream: int) -> Tensor:
        """Tokens [B] drawn from p [B, V], not necessarily normalised. A row of NaN or zeros gives NO_TOKEN."""
        if not isinstance(p, Tensor):
            return p.drawn(self, position, stream)
        if p.shape[0] == 1 and host_transfer.is_on_host(p):
            return self._drawn_alone(None, p, position, stream)
        return greedy_tokens.greedy_token(self.race(p, position, stream))

    def draw_among(self, tokens: Tensor, p: Tensor, position: Tensor, stream: int) -> Tensor:
        """`draw` among the tokens [B, k] with p [B, k]."""
        if p.shape[0] == 1 and host_transfer.is_on_host(p):
            return self._drawn_alone(tokens, p, position, stream)
        race = self._uniform_at(tokens, position, stream).log_() / p
        best = race.max(-1, keepdim=True)
        return greedy_tokens.without_invalid(tokens.gather(1, best.indices), best.values)[:, 0]

    def _drawn_alone(self, tokens: Tensor | None, p: Tensor, position: Tensor, stream: int) -> Tensor:
        """`draw` of one row on the host, which computes only tokens with p > 0. p: [1, k], of tokens [1, k] or None for all.
        Returns [1] int64."""
        chances = p[0].numpy()
        possible = (chances != 0).nonzero()[0]  # [k]
        if not possible.size or not np.isfinite(chances[possible]).all():
            return torch.tensor([greedy_tokens.NO_TOKEN], dtype=torch.int64, device="cpu")
        ids = possible if tokens is None else tokens[0].numpy()[possible]
        bits = _mixed(ids.astype(np.uint64) * np.uint64(PLACE % _WRAP) + np.uint64(self._first_counter(int(position), stream)))
        uniform = bits.view(np.int64) * _SCALE + 0.5  # as in `_unit`
        return torch.tensor([int(ids[(np.log(uniform) / chances[possible]).argmax()])], dtype=torch.int64, device="cpu")

    def _first_counter(self, position: int, stream: int) -> int:
        """`counters` of one row, in [0, 2^64)."""
        return (int(self._start) + position * _POSITION + stream * _STREAM) % _WRAP

    def accept(self, probability: Tensor, position: Tensor, stream: int | Tensor, place: int = 0) -> Tensor:
        """Bernoulli draws [B, k] bool. probability: [B, k], values above 1 count as 1. position: [B, k]. stream: int or [k].
        place: the number of the draw's uniform numbers to use."""
        return _unit(_mix(self._counter(position, stream) + _signed(place * PLACE % _WRAP))) < probability
