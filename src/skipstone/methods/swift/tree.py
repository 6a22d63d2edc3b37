"""Dynamic verification: a tree of a drafted chain and the runners-up of every place as leaves (SWIFT, section 4.2)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft
from skipstone.engines import host_transfer
from skipstone.methods.drafting.chain_stop_rule import Threshold

CONFIDENCES = (0.5, 0.8, 0.95)
"""Upper ends of the ranges of confidence that have a number of candidates each; that of the last range is 1."""


def offered(confidence: Tensor, counts: Sequence[int]) -> Tensor:
    """Number of candidates at a place, its own token included.

    confidence: [B, n]. counts: numbers for confidences in (0, .5], (.5, .8], (.8, .95] and (.95, 1]. Returns [B, n] int64.
    """
    number = torch.full_like(confidence, counts[0], dtype=torch.long)
    for above, count in zip(CONFIDENCES, counts[1:], strict=True):
        number = torch.where(confidence > above, count, number)
    return number


def max_leaves(max_drafts: int, threshold: Threshold, counts: Sequence[int]) -> int:
    """Maximum number of runners-up. A chain goes on only after tokens with more than the threshold's confidence; one of exactly
    that may lose runners-up."""
    lowest = threshold if isinstance(threshold, float) else 0.0
    going_on = max(count for upper, count in zip((*CONFIDENCES, 1.0), counts, strict=True) if upper > lowest or upper == 1.0)
    return (max_drafts - 1) * (going_on - 1) + max(counts) - 1


def with_leaves(chain: Draft, ranked: Tensor, real: Tensor, counts: Sequence[int], max_leaves: int) -> Draft:
    """A tree of a chain (nodes 0 to n - 1) and its runners-up.

    ranked: [B, n, k] int64, the candidates of every place, the chain's own first. real: [B, n, k] bool, tokens that can be
    drawn. counts: as in `offered`. On a CPU the tree has no padding columns, because counting is cheap.
    """
    rows, width, ranks = ranked.shape
    assert chain.confidence is not None, "the number of candidates depends on the confidence"
    rank = torch.arange(1, ranks, device=ranked.device, dtype=torch.int64)
    is_leaf = (rank < offered(chain.confidence, counts)[..., None]) & real[..., 1:] & chain.valid[..., None]  # [B, n, k - 1]
    parent = torch.arange(-1, width - 1, device=ranked.device, dtype=torch.int64)  # [n], the node before every place
    tokens, valid = ranked[..., 1:].flatten(1), is_leaf.flatten(1)  # [B, n (k - 1)]
    max_leaves = min(max_leaves, valid.shape[1])
    if host_transfer.is_on_host(valid):
        max_leaves = min(max_leaves, int(valid.sum(1).max()))
    order = valid.byte().argsort(dim=1, descending=True, stable=True)[:, :max_leaves]
    return Draft(
        torch.cat([chain.tokens, tokens.gather(1, order)], 1),
        torch.cat([chain.valid, valid.gather(1, order)], 1),
        chain.forward,
        parents=torch.cat([parent.expand(rows, width), parent[order // (ranks - 1)]], 1),
        q=chain.q,
        draft_steps=chain.valid.sum(1),
        levels=width,
        siblings=ranks,
    )
