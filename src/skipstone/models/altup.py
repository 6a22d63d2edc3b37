"""Alternating updates (AltUp; Baykal et al., 2023, arXiv 2301.13310) of Gemma 3n: every token has several streams of states. A
layer computes one stream, and predicts and corrects the others.

The layers do that themselves. This file does what transformers' Gemma3nTextModel does in its forward, without a method for it:
it makes streams [k, ..., d] from embeddings, and merges them before the final norm. A projected stream is scaled to the root
mean square of the first one. Between passes the streams of a token are concatenated, [..., k * d].
"""

from typing import Any

import torch
from torch import Tensor

MAKERS = "altup_projections"  # of a decoder: modules that make streams 1 to k - 1 from embeddings
MERGERS = "altup_unembed_projections"  # of a decoder: modules that streams 1 to k - 1 pass before they are merged
MIN_MEAN_SQUARE = 1e-5  # lower bound of the divisor, a stream's mean square


def made(decoder: Any, embedded: Tensor) -> Tensor:
    """The streams that enter layer 0, [k, ..., d]. embedded: [..., d], the first of them."""
    return torch.stack([embedded, *(_like(embedded, one(embedded)) for one in getattr(decoder, MAKERS))])


def merged(decoder: Any, streams: Tensor) -> Tensor:
    """The input of the final norm: the mean of the streams after a layer, [k, ..., d] -> [..., d]."""
    first, *others = streams
    pairs = zip(getattr(decoder, MERGERS), others, strict=True)
    return torch.stack([first, *(_like(first, one(stream)) for one, stream in pairs)]).mean(0)


def folded(streams: Tensor) -> Tensor:
    """Concatenate the streams of every token: [k, ..., d] -> [..., k * d]."""
    return streams.movedim(0, -2).flatten(-2)


def unfolded(hidden: Tensor, count: int) -> Tensor:
    """[..., k * d] -> [k, ..., d]. count: k."""
    return hidden.unflatten(-1, (count, -1)).movedim(-2, 0)


def _like(first: Tensor, stream: Tensor) -> Tensor:
    """Scale a stream, [..., d], to the root mean square of the first one."""
    stream = stream.to(first)
    magnitude = first.square().mean(-1, keepdim=True) ** 0.5  # [..., 1]
    return stream * magnitude / stream.square().mean(-1, keepdim=True).clamp(min=MIN_MEAN_SQUARE).sqrt()
