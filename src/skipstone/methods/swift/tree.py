"""Dynamic verification: a tree of a drafted chain and the runners-up of every place as leaves (SWIFT, section 4.2)."""

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft
from skipstone.engines import host_transfer

CANDIDATES = ((0.95, 1), (0.8, 3), (0.5, 5))  # (confidence, number of tokens of a place above it, with the chain's own)
RANKS = 10  # number of tokens of a place with less confidence
MAX_LEAVES = 57  # maximum number of runners-up in a tree


def offered(confidence: Tensor) -> Tensor:
    """Number of tokens at a place: 10, 5, 3, 1 for a confidence in (0, .5], (.5, .8], (.8, .95], (.95, 1].

    confidence: [B, n]. Returns [B, n] int64.
    """
    count = torch.full_like(confidence, RANKS, dtype=torch.long)
    for above, tokens in reversed(CANDIDATES):
        count = torch.where(confidence > above, tokens, count)
    return count


def chances(confidence: Tensor, ranks: int) -> Tensor:
    """Estimated probability that a runner-up is accepted: the chain is right before its place and wrong there.

    Each rank is half as likely as the one before. confidence: [B, n], of the chain's tokens. Returns [B, n, ranks - 1] float32.
    """
    reached = torch.nn.functional.pad(confidence.float().cumprod(1), (1, -1), value=1.0)
    return (reached * (1 - confidence))[..., None] * 0.5 ** torch.arange(
        1, ranks, dtype=torch.float32, device=confidence.device
    )


def with_leaves(chain: Draft, ranked: Tensor, real: Tensor, max_leaves: int = MAX_LEAVES) -> Draft:
    """A tree of a chain (nodes 0 to n - 1) and its at most `max_leaves` likeliest runners-up.

    ranked: [B, n, k] int64, the best tokens of every place, the chain's own first. real: [B, n, k] bool, tokens that can be
    drawn. Without confidences every place has RANKS tokens. On a CPU the tree has no padding columns, because counting is
    cheap.
    """
    rows, width, ranks = ranked.shape
    device = ranked.device
    confidence = chain.confidence
    if confidence is None:
        confidence = torch.full(ranked.shape[:2], 0.5, dtype=torch.float32, device=device)
    rank, chance = torch.arange(1, ranks, device=device, dtype=torch.int64), chances(confidence, ranks)
    is_leaf = (rank < offered(confidence)[..., None]) & real[..., 1:] & chain.valid[..., None]  # [B, n, k - 1]
    parent = torch.arange(-1, width - 1, device=device, dtype=torch.int64)  # [n], the node before every place
    tokens, valid = ranked[..., 1:].flatten(1), is_leaf.flatten(1)  # [B, n (k - 1)]
    max_leaves = min(max_leaves, valid.shape[1])
    if host_transfer.is_on_host(valid):
        max_leaves = min(max_leaves, int(valid.sum(1).max()))
    order = torch.where(is_leaf, chance, -1.0).flatten(1).argsort(dim=1, descending=True, stable=True)[:, :max_leaves]
    return Draft(
        torch.cat([chain.tokens, tokens.gather(1, order)], 1),
        torch.cat([chain.valid, valid.gather(1, order)], 1),
        chain.forward,
        parents=torch.cat([parent.expand(rows, width), parent[order // (ranks - 1)]], 1),
        draft_steps=chain.valid.sum(1),
        levels=width,
    )
