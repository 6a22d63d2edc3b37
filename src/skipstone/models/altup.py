"""Alternating updates (AltUp; Baykal et al., 2023, arXiv 2301.13310) as transformers' Gemma 3n has them: every token has
several streams of states, of which a layer computes one and predicts and corrects the others.

The layers do that themselves. What is before and behind them is in the forward of transformers' Gemma3nTextModel, which has no
method for it, and so it is here: streams [k, ..., d] are made of the embeddings, and merged into what the final norm reads. A
stream is brought to the root mean square of the first one whenever it has been projected. Between passes the streams of a token
lie one behind the other, [..., k * d].
"""

from typing import Any

import torch
from torch import Tensor

MAKERS = "altup_projections"  # of a decoder: what makes streams 1 to k - 1 of the embeddings
MERGERS = "altup_unembed_projections"  # of a decoder: what streams 1 to k - 1 go through before they are merged
MIN_MEAN_SQUARE = 1e-5  # mean square of a projected stream that it is divided by at least


def made(decoder: Any, embedded: Tensor) -> Tensor:
    """The streams that enter layer 0. embedded: [..., d], which is the first of them. Returns [k, ..., d]."""
    return torch.stack([embedded, *(_like(embedded, one(embedded)) for one in getattr(decoder, MAKERS))])


def merged(decoder: Any, streams: Tensor) -> Tensor:
    """What the final norm reads: the mean of the streams that leave a layer, [k, ..., d] -> [..., d]."""
    first, *others = streams
    pairs = zip(getattr(decoder, MERGERS), others, strict=True)
    return torch.stack([first, *(_like(first, one(stream)) for one, stream in pairs)]).mean(0)


def folded(streams: Tensor) -> Tensor:
    """The streams of a token one behind the other: [k, ..., d] -> [..., k * d]."""
    return streams.movedim(0, -2).flatten(-2)


def unfolded(hidden: Tensor, count: int) -> Tensor:
    """[..., k * d] -> [k, ..., d]. count: k."""
    return hidden.unflatten(-1, (count, -1)).movedim(-2, 0)


def _like(first: Tensor, stream: Tensor) -> Tensor:
    """A stream, [..., d], at the root mean square of the first one."""
    stream = stream.to(first)
    wanted = first.square().mean(-1, keepdim=True) ** 0.5  # [..., 1]
    return stream * wanted / stream.square().mean(-1, keepdim=True).clamp(min=MIN_MEAN_SQUARE).sqrt()
