"""One price for all decisions: a unit of time is worth so many tokens, and what gains more tokens than it costs is done.

The text is given, a policy changes the time alone. Tokens per unit of time of a renewal process, max E[tokens] / E[time], are
the root `price` of max E[tokens - price * time] = 0 (Dinkelbach, 1967). So every decision has the same form: take it where the
tokens that are gained are at least price x time.

Times are in any one unit, mostly steps of plain decoding; the price is in tokens of that unit. `scoring(n)` is the time of a
pass that scores n tokens, the last committed one among them, and never falls. A survival S_i is the probability that the i-th
draft is accepted and all before it are. Survivals fall along every path of a draft.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul
from typing import NamedTuple

Scoring = Callable[[int], float]

AHEAD = 8
"""Drafts that `thresholds` looks ahead. A scoring pass may cost the same for a few tokens more and then much more at once, and
who looks one draft ahead never crosses such a step."""
NEVER = float("inf")
"""A threshold that no survival reaches."""


class Lengths(NamedTuple):
    """How many tokens to score beside the last committed one, and how many a step is then expected to commit."""

    drafts: int
    tokens: float


class RankTree(NamedTuple):
    """A tree of drafts, in an order in which every prefix is a tree. parents: of every node the number of an earlier one, -1
    for the last committed token. ranks: of every node, its place among its parent's likeliest continuations, from 0. tokens:
    how many a step is expected to commit."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]
    tokens: float


def survivals(acceptances: Sequence[float]) -> list[float]:
    """S_1, S_2, ... of a chain whose drafts are accepted with these probabilities, each given those before it."""
    return list(accumulate(acceptances, mul))


def thresholds(draft_step: float, fixed: float, scoring: Scoring, acceptance: float, price: float, most: int) -> list[float]:
    """theta_0 .. theta_(most - 1): with i drafts, draft on where the survival of these is at least theta_i (S_0 = 1).

    draft_step: time of one. fixed: time that a step takes beside its draft steps and its scoring as soon as it drafts.
    acceptance: of a draft of this drafter, on average. With A the acceptance, c the draft step, V the scoring and o the rest,

        theta_i = min over m of price (m c + V(i + 1 + m) - V(i + 1) [+ o where i = 0]) / (A + A^2 + ... + A^m).

    Where V is flat this is price c / A. Optimal where survivals only fall and thresholds do not.
    """
    if acceptance <= 0:
        return [NEVER] * most
    gains = list(accumulate(acceptance**m for m in range(1, AHEAD + 1)))
    times = [drafts * draft_step + scoring(drafts + 1) for drafts in range(most + 1)]  # of a draft that goes as far
    found = []
    for drafts in range(most):
        begun = times[drafts] - (fixed if drafts == 0 else 0.0)
        ahead = zip(times[drafts + 1 :], gains, strict=False)
        found.append(price * min([(time - begun) / gain for time, gain in ahead]))
    return found


def trim(survival: Sequence[float], price: float, scoring: Scoring) -> Lengths:
    """How much of a drafted chain to score, of which nothing has to be: argmax of the expected tokens - price x V."""
    return _best_prefix(survival, price, scoring, rows=1)


def tree(acceptances: Sequence[float], price: float, scoring: Scoring, *, most: int, depth: int) -> RankTree:
    """The tree that is worth most. acceptances: of the likeliest continuation of a token, of the next one, ... most: nodes.
    depth: nodes on a path.

    Nodes are taken in the order of their survivals, as Sequoia does (arXiv 2402.12374), and cut where the expected tokens -
    price x V are most.
    """
    waiting = [(-chance, -1, rank, 1) for rank, chance in enumerate(acceptances) if chance > 0]
    heapq.heapify(waiting)
    parents, ranks, survival = [], [], []
    while waiting and len(parents) < most:
        negative, parent, rank, level = heapq.heappop(waiting)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        survival.append(-negative)
        if level < depth:
            for place, chance in enumerate(acceptances):
                if chance > 0:
                    heapq.heappush(waiting, (negative * chance, node, place, level + 1))
    kept, tokens = _best_prefix(survival, price, scoring, rows=1)
    return RankTree(tuple(parents[:kept]), tuple(ranks[:kept]), tokens)


def allocate(survival: Sequence[Sequence[float]], price: float, scoring: Scoring) -> list[int]:
    """How many drafts of every row of a batch to score. survival: of every row's drafts. scoring: n -> time of a pass of n
    tokens of all rows together, with one of each row at least.

    One price for the batch: the drafts of all rows in the order of their survivals, cut where the expected tokens - price x V
    are most (arXiv 2502.15197). A row's survivals fall, so that what is kept of it is the beginning of its chain.
    """
    if len(survival) == 1:
        return [trim(survival[0], price, scoring).drafts]
    order = sorted(((-one, place, row) for row, chain in enumerate(survival) for place, one in enumerate(chain)))
    kept = _best_prefix([-one for one, _, _ in order], price, scoring, rows=len(survival)).drafts
    counts = [0] * len(survival)
    for _, _, row in order[:kept]:
        counts[row] += 1
    return counts


def _best_prefix(survival: Sequence[float], price: float, scoring: Scoring, rows: int) -> Lengths:
    """The prefix with the most expected tokens - price x V; of two that are worth the same the longer one. rows: tokens that
    are scored in any case, each of which brings one."""
    tokens = float(rows)
    best, worth = Lengths(0, tokens), tokens - price * scoring(rows)
    for count, one in enumerate(survival, 1):
        tokens += one
        now = tokens - price * scoring(rows + count)
        if now >= worth:
            best, worth = Lengths(count, tokens), now
        elif now + one * (len(survival) - count) < worth:  # survivals only fall, and scoring never gets cheaper
            break
    return best
