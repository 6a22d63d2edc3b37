"""Dynamic verification: a drafted chain with the runners-up of every place as leaves, one tree (SWIFT, section 4.2)."""

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft
from skipstone.engines import host_transfer

CANDIDATES = ((0.95, 1), (0.8, 3), (0.5, 5))  # (confidence, tokens that a place offers above it, the chain's among them)
RANKS = 10  # tokens that a place of no more confidence offers
MOST_LEAVES = 57  # runners-up in a tree


def offered(confidence: Tensor) -> Tensor:
    """How many tokens a place offers: 10, 5, 3, 1 for a confidence in (0, .5], (.5, .8], (.8, .95], (.95, 1].

    confidence: [B, n]. Returns [B, n] int64.
    """
    count = torch.full_like(confidence, RANKS, dtype=torch.long)
    for above, tokens in reversed(CANDIDATES):
        count = torch.where(confidence > above, tokens, count)
    return count


def chances(confidence: Tensor, ranks: int) -> Tensor:
    """How likely a runner-up is reached and is the target's token: the chain is right before its place and wrong there, and
    every further rank is half as likely as the one before.

    confidence: [B, n], of the chain's tokens. Returns [B, n, ranks - 1] float32.
    """
    reached = torch.nn.functional.pad(confidence.float().cumprod(1), (1, -1), value=1.0)
    return (reached * (1 - confidence))[..., None] * 0.5 ** torch.arange(
        1, ranks, dtype=torch.float32, device=confidence.device
    )


def with_leaves(chain: Draft, ranked: Tensor, real: Tensor, max_leaves: int = MOST_LEAVES) -> Draft:
    """A chain and its runners-up. The chain's nodes come first, so that node j of the chain is place j; then come at most
    `max_leaves` leaves, the likeliest ones. On the CPU, where it costs nothing to know how many there are, the tree is no wider
    than that.

    ranked: [B, n, k] int64, the tokens of every place, best first, which is the chain's. real: [B, n, k] bool, those that can
    be drawn at all. Without confidences every place offers RANKS.
    """
    rows, width, ranks = ranked.shape
    device = ranked.device
    confidence = chain.confidence
    if confidence is None:
        confidence = torch.full(ranked.shape[:2], 0.5, dtype=torch.float32, device=device)
    rank, chance = torch.arange(1, ranks, device=device, dtype=torch.int64), chances(confidence, ranks)
    wanted = (rank < offered(confidence)[..., None]) & real[..., 1:] & chain.valid[..., None]  # [B, n, k - 1]
    above = torch.arange(-1, width - 1, device=device, dtype=torch.int64)  # [n], the node before every place
    tokens, valid = ranked[..., 1:].flatten(1), wanted.flatten(1)  # [B, n (k - 1)]
    max_leaves = min(max_leaves, valid.shape[1])
    if host_transfer.is_on_host(valid):
        max_leaves = min(max_leaves, int(valid.sum(1).max()))
    order = torch.where(wanted, chance, -1.0).flatten(1).argsort(dim=1, descending=True, stable=True)[:, :max_leaves]
    return Draft(
        torch.cat([chain.tokens, tokens.gather(1, order)], 1),
        torch.cat([chain.valid, valid.gather(1, order)], 1),
        chain.forward,
        parents=torch.cat([above.expand(rows, width), above[order // (ranks - 1)]], 1),
        draft_steps=chain.valid.sum(1),
        levels=width,
    )
