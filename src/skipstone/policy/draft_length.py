"""How many tokens to draft: as long as the expected gain is larger than the price of the time.

A policy changes only the time, not the text. The best rate max E[tokens] / E[time] is the root `price` of
max E[tokens - price x time] = 0 (Dinkelbach, 1967): a plain step is worth `price` tokens. A draft is made if it gains more
tokens than its time is worth.

Times are in plain steps. `scoring(n)` is V(n), the time of a pass that scores n tokens of a row, the last committed token
among them. It never falls. A survival S_i is the probability that the first i drafts are all accepted.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

Scoring = Callable[[int], float]

LOOKAHEAD = 8  # drafts that a rule must look ahead to cross a step of V: kernels round up to 8 rows
MAX_DRAFTS = 24  # of a chain: with an acceptance of .9 the next one survives in 7 of 100 steps
NEVER = float("inf")  # a threshold that no survival reaches


class RankTree(NamedTuple):
    """A tree of drafts, in an order in which every prefix is a tree. parents: number of an earlier node, -1 for the last
    committed token. ranks: place of a node among its parent's likeliest continuations, from 0."""

    parents: tuple[int, ...]
    ranks: tuple[int, ...]


def stop_thresholds(
    draft_step: float, fixed: float, scoring: Scoring, acceptance: float, price: float, max_drafts: int
) -> list[float]:
    """theta_0 .. theta_(max_drafts - 1): after i drafts, draft on if their survival is at least theta_i (S_0 = 1).

    With c = draft_step, o = fixed (added by the first draft), V = scoring and A = the drafter's mean acceptance,

        theta_i = min over m of price (m c + V(i + 1 + m) - V(i + 1) [+ o if i = 0]) / (A + A^2 + ... + A^m).

    If V is flat this is price c / A. It is optimal if survivals only fall and thresholds never do.
    """
    if acceptance <= 0:
        return [NEVER] * max_drafts
    gains = list(accumulate(acceptance**m for m in range(1, LOOKAHEAD + 1)))
    times = [drafts * draft_step + scoring(drafts + 1) for drafts in range(max_drafts + 1)]
    thresholds = []
    for drafts in range(max_drafts):
        spent = times[drafts] - (fixed if drafts == 0 else 0.0)
        thresholds.append(price * min([(time - spent) / gain for time, gain in zip(times[drafts + 1 :], gains, strict=False)]))
    return thresholds


def best_drafts(survivals: Sequence[Sequence[float]], price: float, scoring: Scoring) -> list[int]:
    """How many given drafts of each row to score: argmax of the expected tokens - price x V.

    survivals: [row][draft]. scoring: n tokens of all rows together -> time. The drafts of all rows are taken in the order of
    their survivals, at one price for the batch (arXiv 2502.15197). Survivals fall along a row, so each row keeps a prefix.
    """
    order = sorted((-one, place, row) for row, chain in enumerate(survivals) for place, one in enumerate(chain))
    counts = [0] * len(survivals)
    for _, _, row in order[: _best_prefix([-one for one, _, _ in order], price, scoring, len(survivals))]:
        counts[row] += 1
    return counts


def best_tree(acceptances: Sequence[float], price: float, scoring: Scoring, *, max_nodes: int, max_depth: int) -> RankTree:
    """The tree with the most expected tokens - price x V, in which every node's continuations have the same acceptances.

    acceptances: of the likeliest continuation of a token, of the next one, ... Nodes are taken in the order of their survivals,
    as Sequoia does (arXiv 2402.12374).
    """
    waiting = [(-chance, -1, rank, 1) for rank, chance in enumerate(acceptances) if chance > 0]
    heapq.heapify(waiting)
    parents, ranks, survivals = list[int](), list[int](), list[float]()
    while waiting and len(parents) < max_nodes:
        negative, parent, rank, depth = heapq.heappop(waiting)
        node = len(parents)
        parents.append(parent)
        ranks.append(rank)
        survivals.append(-negative)
        if depth < max_depth:
            for place, chance in enumerate(acceptances):
                if chance > 0:
                    heapq.heappush(waiting, (negative * chance, node, place, depth + 1))
    count = _best_prefix(survivals, price, scoring, 1)
    return RankTree(tuple(parents[:count]), tuple(ranks[:count]))


def _best_prefix(survivals: Sequence[float], price: float, scoring: Scoring, rows: int) -> int:
    """The largest number of drafts with the most expected tokens - price x V. rows: tokens that are scored in any case, each of
    which brings one token."""
    tokens = float(rows)
    best, best_worth = 0, tokens - price * scoring(rows)
    for count, one in enumerate(survivals, 1):
        tokens += one
        worth = tokens - price * scoring(rows + count)
        if worth >= best_worth:
            best, best_worth = count, worth
        elif worth + one * (len(survivals) - count) < best_worth:  # survivals only fall, and V never does
            break
    return best
