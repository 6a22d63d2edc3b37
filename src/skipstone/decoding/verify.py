"""Acceptance rules as pure functions: a draft, the target's scores and noise -> a Verdict.

`match` is exact for deterministic drafters, chains and trees: the target draws its own token at every node and follows the
draft while it agrees. `leviathan` is exact in law for a stochastic chain (Leviathan, Kalman, Matias, arXiv 2211.17192,
Algorithm 1), and `recursive_rejection` for a stochastic tree. In greedy decoding p is one-hot.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from skipstone.decoding.draft import Draft, GreedyVerdict, Verdict
from skipstone.decoding.noise import ACCEPT, TARGET, LazyDistribution, Noise, substream
from skipstone.engines import host_transfer

CACHED = 2**17  # number of probabilities that fit into a CPU's cache
Probability = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(node [B], -1 for the root; tokens of the path so far [B, k]; walking [B] bool) -> p after that node [B, V].

The result for rows that do not walk is arbitrary.
"""
DrawSource = Callable[[Tensor, Tensor, Tensor], Tensor | LazyDistribution]
"""As `Probability`, for a draw only."""


def match(draft: Draft, p: DrawSource, position: Tensor, noise: Noise, waived: Tensor | None = None) -> Verdict:
    """Draw x from p at the root. While x is a child of the current node, move to that child and draw again.

    With the same seed the text is that of plain sampling. position: [B], of the first new token. waived: [B, n] bool, tokens of
    a chain that the walk accepts for any x; None for none.
    """
    rows, width = draft.tokens.shape
    assert waived is None or draft.parents is None, "only tokens of a chain can be waived"
    node = draft.tokens.new_full((rows,), -1)
    if not width:
        drawn = noise.draw(p(node, draft.tokens, torch.ones_like(node, dtype=torch.bool)), position, TARGET)
        return Verdict(draft.tokens, drawn[:, None], torch.zeros_like(node))
    overruled = None if waived is None else torch.zeros_like(draft.valid)
    walking = torch.ones_like(node, dtype=torch.bool)
    accepted, path, tokens = torch.zeros_like(node), [], []
    chain = torch.arange(width, device=node.device, dtype=torch.int64) - 1
    parents = chain.expand(rows, width) if draft.parents is None else draft.parents
    levels = width if draft.levels is None else min(draft.levels, width)
    for depth in range(levels + 1):
        so_far = torch.stack(tokens, 1) if tokens else node.new_empty((rows, 0))
        x = noise.draw(p(node, so_far, walking), position + depth, TARGET)
        if waived is not None and overruled is not None and depth < width:
            against = walking & waived[:, depth] & draft.offered[:, depth] & (draft.tokens[:, depth] != x)
            x, overruled[:, depth] = torch.where(against, draft.tokens[:, depth], x), against
        tokens.append(x)
        if depth == levels:
            break
        child = draft.offered & (parents == node[:, None]) & (draft.tokens == x[:, None])
        has_child, index = child.max(1)
        walking = walking & has_child
        node = torch.where(walking, index, node)
        path.append(node)
        accepted = accepted + walking
        if _has_ended(walking):
            break
    verdict = _verdict(path, tokens, accepted, width)
    verdict.overruled = overruled
    return verdict


def match_greedy(draft: Draft, picks: Tensor, waived: Tensor | None = None) -> GreedyVerdict:
    """`match` for greedy rows. picks: [B, n+1] int64, the target's likeliest tokens, the root's first. waived: as there."""
    assert waived is None or draft.parents is None, "only tokens of a chain can be waived"
    return GreedyVerdict(draft, picks, waived)


def leviathan(draft: Draft, p: Probability | Tensor, position: Tensor, noise: Noise, waived: Tensor | None = None) -> Verdict:
    """Accept each draft token x with probability min(1, p(x) / q(x)). At the first rejection draw from the residual
    norm(max(0, p - q)), after full acceptance from p.

    draft: a chain with q [B, n, V]. p: after every node [B, n+1, V], the root first, or a function for one node at a time.
    position: [B], of the first new token. waived: [B, n] bool, tokens that the walk accepts in any case; None for none.
    """
    assert draft.q is not None, "leviathan needs the distributions that the draft was drawn from"
    assert draft.parents is None, "leviathan needs a chain"
    rows, width = draft.tokens.shape
    q = one_hot_where(draft)
    waived_here = torch.zeros_like(draft.valid) if waived is None else waived & draft.offered
    if isinstance(p, Tensor):
        passed = _passes(draft, p[:, :-1], q, 0, position, noise)
        accepted = (passed | waived_here).long().cumprod(1).sum(1)
        target = p[torch.arange(rows, device=p.device, dtype=torch.int64), accepted]
    else:
        walking = torch.ones(rows, dtype=torch.bool, device=draft.tokens.device)
        accepted = draft.tokens.new_zeros(rows)
        target, passed = p(accepted - 1, draft.tokens[:, :0], walking), torch.ones_like(draft.valid)
        for depth in range(width):
            passed[:, depth] = _passes(draft, target[:, None], q, depth, position, noise)[:, 0]
            walking = walking & (passed[:, depth] | waived_here[:, depth])
            accepted = accepted + walking
            if _has_ended(walking):
                break
            after = p(accepted - 1, draft.tokens[:, : depth + 1], walking)
            target = torch.where(walking[:, None], after, target)
    # after the end of a row's draft q = 0, so the residual is p itself (the bonus token)
    q_or_zero = torch.nn.functional.pad(q * draft.offered[:, :, None], (0, 0, 0, 1))
    rest = residual(target, q_or_zero[torch.arange(rows, device=q.device, dtype=torch.int64), accepted])
    last = noise.draw(rest, position + accepted, TARGET)
    tokens = torch.cat([draft.tokens, torch.zeros_like(last)[:, None]], 1).scatter(1, accepted[:, None], last[:, None])
    path = torch.arange(width, device=tokens.device, dtype=torch.int64).expand(rows, width)
    overruled = None if waived is None else ~passed & (path < accepted[:, None])
    return Verdict(path, tokens, accepted, overruled)


def recursive_rejection(draft: Draft, p: Probability, position: Tensor, noise: Noise) -> Verdict:
    """Test the children of a node one after another, each as `leviathan` tests the token of a chain.

    If x is rejected, p becomes the residual norm(max(0, p - q)), and q loses x, because siblings are drawn without replacement
    (Jeon et al., arXiv 2402.14160). If x is accepted, the walk goes on below it. If no child is left, the next token is drawn
    from p. A token with q = 0 was not drawn: its q is one-hot.

    draft: a tree with q. position: [B], of the first new token.
    """
    assert draft.q is not None, "recursive rejection needs the distributions that the draft was drawn from"
    assert draft.parents is not None, "recursive rejection needs a tree"
    (rows, width), last = draft.tokens.shape, draft.q.shape[1] - 1
    row = torch.arange(rows, device=draft.tokens.device, dtype=torch.int64)
    node = draft.tokens.new_full((rows,), -1)
    walking, accepted, path = torch.ones_like(node, dtype=torch.bool), torch.zeros_like(node), draft.tokens[:, :0]
    target = p(node, path, walking)
    for depth in range(width if draft.levels is None else min(draft.levels, width)):
        is_child = draft.offered & (draft.parents == node[:, None]) & walking[:, None]
        q, number, walking = draft.q[row, (node + 1).clamp_max(last)], is_child.cumsum(1), torch.zeros_like(walking)
        for place in range(width if draft.siblings is None else draft.siblings):
            is_tested, child = (is_child & (number == place + 1) & ~walking[:, None]).max(1)
            if _has_ended(is_tested):
                break
            x = draft.tokens.gather(1, child[:, None])  # [B, 1]
            q = torch.where(q.gather(1, x) > 0, q, torch.zeros_like(q).scatter(1, x, 1.0))
            ratio = target.gather(1, x) / q.gather(1, x)
            passes = is_tested & noise.accept(ratio, position[:, None] + depth, substream(ACCEPT, depth), place)[:, 0]
            node, walking, rejects = torch.where(passes, child, node), walking | passes, (is_tested & ~passes)[:, None]
            target, q = torch.where(rejects, residual(target, q), target), torch.where(rejects, without(q, x), q)
        path, accepted = torch.cat([path, node[:, None]], 1), accepted + walking
        if _has_ended(walking):
            break
        after = p(node, draft.tokens.gather(1, path.clamp_min(0)), walking)
        target = torch.where(walking[:, None], after, target)
    drawn = noise.draw(target, position + accepted, TARGET)[:, None]
    path = torch.nn.functional.pad(path.clamp_min(0), (0, width - path.shape[1]))
    return Verdict(path, torch.cat([draft.tokens.gather(1, path), drawn], 1).scatter(1, accepted[:, None], drawn), accepted)


def _passes(draft: Draft, p: Tensor, q: Tensor, first: int, position: Tensor, noise: Noise) -> Tensor:
    """Leviathan's test of k draft tokens from number `first` on, each by itself. p: [B, k, V] before each of them. q: [B, n,
    V]. Returns [B, k] bool."""
    places = torch.arange(first, first + p.shape[1], device=p.device, dtype=torch.int64)
    x = draft.tokens[:, first : first + p.shape[1], None]
    ratio = p.gather(2, x) / q[:, first : first + p.shape[1]].gather(2, x)
    passes = noise.accept(ratio.squeeze(2), position[:, None] + places, substream(ACCEPT, places))
    return passes & draft.offered[:, first : first + p.shape[1]]


def one_hot_where(draft: Draft) -> Tensor:
    """q of every draft token [B, n, V], one-hot for tokens that were not drawn at random."""
    assert draft.q is not None
    if draft.stochastic is None:
        return draft.q
    one_hot = torch.zeros_like(draft.q).scatter(2, draft.tokens[:, :, None], 1.0)
    return torch.where(draft.stochastic[:, :, None], draft.q, one_hot)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) over the last dimension. If p = q it is p, which only floating-point errors can need."""
    rest = (p - q).clamp_min(0)
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0, rest / total, p)


def without(q: Tensor, x: Tensor) -> Tensor:
    """q [B, V] without the tokens x [B, 1], normalised again; 0 if nothing is left."""
    rest = q.scatter(1, x, 0.0)
    return rest / rest.sum(-1, keepdim=True).clamp_min(torch.finfo(q.dtype).tiny)


def entropy(p: Tensor, base: float = 2.0) -> Tensor:
    """Shannon entropy over the last dimension, in bits by default; 0 log 0 = 0."""
    return -torch.xlogy(p, p).sum(-1) / math.log(base)


def js_distance(p: Tensor, q: Tensor) -> Tensor:
    """Square root of the Jensen-Shannon divergence in bits, over the last dimension; in [0, 1]."""
    divergence = entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2
    return divergence.clamp(0, 1).sqrt()


def spread(logits: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(logits) and its `entropy` in bits. logits: [..., V]. Returns ([..., V], [...]).

    H = -sum p (x - logsumexp(x)), which needs no logarithm per entry.
    """
    p = logits.softmax(-1)
    logsumexp = logits.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log()
    log_p = (logits - logsumexp).clamp_min_(torch.finfo(logits.dtype).min)  # finite, so that 0 log 0 = 0
    return p, torch.linalg.vecdot(p, log_p).neg_().clamp_min_(0) / math.log(2)


def js_distances(logits: Tensor, q: Tensor, entropy_q: Tensor) -> Tensor:
    """`js_distance` of softmax(logits) and q. logits, q: [B, n, V]. entropy_q: [B, n], in bits. Returns [B, n].

    A CPU computes a few distributions at a time, so that they stay in its cache. In float32 with 128k entries the error is
    about 1e-3.
    """
    rows, width, size = logits.shape
    step = max(1, CACHED // size) if host_transfer.is_on_host(logits) else rows * width
    parts = zip(logits.flatten(0, 1).split(step), q.flatten(0, 1).split(step), entropy_q.flatten().split(step), strict=True)
    return torch.cat([_js_distances(*part) for part in parts]).view(rows, width)


def _js_distances(logits: Tensor, q: Tensor, entropy_q: Tensor) -> Tensor:
    p, entropy_p = spread(logits)
    middle = p.add_(q).mul_(0.5)
    log_middle = middle.clamp_min(torch.finfo(p.dtype).tiny).log_()
    divergence = -torch.linalg.vecdot(middle, log_middle) / math.log(2) - (entropy_p + entropy_q) / 2
    return divergence.clamp(0, 1).sqrt()


def _has_ended(walking: Tensor) -> bool:
    """Whether no row walks on. Always False on an accelerator, where the check would synchronise."""
    return host_transfer.is_on_host(walking) and not bool(walking.any())


def _verdict(path: list[Tensor], tokens: list[Tensor], accepted: Tensor, width: int) -> Verdict:
    """Pad the walked steps to the full width."""
    rows = accepted.shape[0]
    missing = width - len(path)
    nodes = torch.stack(path, 1) if path else accepted.new_empty((rows, 0))
    nodes = torch.cat([nodes, nodes.new_zeros((rows, missing))], 1) if missing > 0 else nodes[:, :width]
    drawn = torch.stack(tokens, 1)
    pad = width + 1 - drawn.shape[1]
    return Verdict(nodes, torch.cat([drawn, drawn.new_zeros((rows, pad))], 1) if pad else drawn, accepted)
