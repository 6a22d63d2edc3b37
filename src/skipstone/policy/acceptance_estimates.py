"""Probability that a draft is accepted: by the drafter's confidence, the length of a match, or the rank of a kept token.

All three learn from judged drafts. Older ones count less.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from skipstone.policy.draft_length import MAX_DRAFTS, RankTree, best_tree

PRIOR_SLOPE, PRIOR_OFFSET = 0.7, -0.3  # prior of logit acceptance = slope x logit confidence + offset: overconfident drafters
PRIOR_VARIANCES = (0.25, 1.0)  # of slope and offset around the prior; no later belief is less certain
CLOSEST = 3e-4  # distance of a confidence from 0 and 1 at least, as in the native engine's chain
PRIOR_ACCEPTANCE = 0.6  # prior mean acceptance: the middle of .42 to .86, the drafters' means in docs/lab
MATCH_DOUBT = 3.0  # prior: a match of m tokens continues rightly with probability m / (m + 3), .25 at 1 and .77 at 10
PRIOR_WEIGHT = 10.0  # judged drafts or tokens that each prior counts as
MEMORY = 400.0  # judged drafts or tokens after which one counts 1/e: a request or two
MATCH_BUCKETS = 4  # classes of match lengths: 1, 2 to 3, 4 to 7, at least 8 tokens
FIRST_RANK, RANKS = 0.4, 5  # prior probability of the first kept token, halved with each rank (docs/lab: .38 to .52 on prose)
TREE_TOKENS, TREE_DEPTH = 200, 6  # tokens between two constructions of the tree; its depth: seven hits in a row are rare


@dataclass(slots=True)
class ConfidenceAcceptance:
    """P(accepted | confidence) = sigmoid(slope logit(confidence) + offset), learnt one draft at a time.

    The belief about (slope, offset) is Gaussian. Every draft moves it by one Newton step, as in online Bayesian logistic
    regression (Spiegelhalter and Lauritzen, Networks 1990). mean: of the acceptances, from `weight` drafts.
    """

    slope: float = PRIOR_SLOPE
    offset: float = PRIOR_OFFSET
    slope_variance: float = PRIOR_VARIANCES[0]
    offset_variance: float = PRIOR_VARIANCES[1]
    covariance: float = 0.0
    mean: float = PRIOR_ACCEPTANCE
    weight: float = PRIOR_WEIGHT

    def predict(self, confidence: float) -> float:
        """The acceptance of a draft of this confidence, 0 to 1."""
        return _sigmoid(self.slope * _logit(confidence) + self.offset)

    def observe(self, drafts: Iterable[tuple[float, bool]]) -> None:
        """Learns from judged drafts: (confidence, accepted)."""
        slope, offset, covariance, keep = self.slope, self.offset, self.covariance, 1 - 1 / MEMORY
        slope_variance, offset_variance, mean, weight = self.slope_variance, self.offset_variance, self.mean, self.weight
        for confidence, accepted in drafts:
            place = _logit(confidence)
            predicted = _sigmoid(slope * place + offset)
            slope_gain, offset_gain = slope_variance * place + covariance, covariance * place + offset_variance
            shrink = 1 / (1 / max(predicted * (1 - predicted), CLOSEST) + slope_gain * place + offset_gain)
            slope_variance = min((slope_variance - shrink * slope_gain**2) / keep, PRIOR_VARIANCES[0])
            offset_variance = min((offset_variance - shrink * offset_gain**2) / keep, PRIOR_VARIANCES[1])
            limit = math.sqrt(max(slope_variance * offset_variance, 0.0))
            covariance = min(max((covariance - shrink * slope_gain * offset_gain) / keep, -limit), limit)
            error, weight = accepted - predicted, weight * keep + 1
            slope = max(slope + (slope_variance * place + covariance) * error, 0.0)
            offset += (covariance * place + offset_variance) * error
            mean += (accepted - mean) / weight
        self.slope, self.offset, self.covariance, self.mean, self.weight = slope, offset, covariance, mean, weight
        self.slope_variance, self.offset_variance = slope_variance, offset_variance


@dataclass(slots=True)
class MatchAcceptance:
    """P(the i-th token of a match's continuation is right | those before it are), by the length of the match.

    accepted, judged: [bucket][place], discounted counts. After i right tokens a match counts as i tokens longer.
    """

    accepted: list[list[float]] = field(
        default_factory=lambda: [
            [PRIOR_WEIGHT / (1 + MATCH_DOUBT / (2**b + i)) for i in range(MAX_DRAFTS)] for b in range(MATCH_BUCKETS)
        ]
    )
    judged: list[list[float]] = field(default_factory=lambda: [[PRIOR_WEIGHT] * MAX_DRAFTS for _ in range(MATCH_BUCKETS)])

    def predict(self, match: int, max_drafts: int) -> list[float]:
        """Survivals: the probabilities that the first 1, 2, ... tokens of the continuation are all right."""
        bucket = _bucket(match)
        pairs = zip(self.accepted[bucket][:max_drafts], self.judged[bucket], strict=False)
        return list(accumulate([accepted / judged for accepted, judged in pairs], mul))

    def observe(self, match: int, right: int, compared: int) -> None:
        """Learns from the text after a match. right: tokens of the continuation up to the first wrong one. compared: tokens of
        the continuation that the text is long enough to judge."""
        accepted, judged, keep = self.accepted[_bucket(match)], self.judged[_bucket(match)], 1 - 1 / MEMORY
        for place in range(min(right + 1, compared, MAX_DRAFTS)):
            accepted[place] = accepted[place] * keep + (place < right)
            judged[place] = judged[place] * keep + 1


@dataclass(slots=True)
class RankAcceptance:
    """How often the token that was kept first, second, ... for a token follows it, and the best tree of drafts.

    pending: ranks of committed tokens that the tree has not decoded virtually yet.
    """

    hits: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT * FIRST_RANK / 2**rank for rank in range(RANKS)])
    tokens: float = PRIOR_WEIGHT
    tree: RankTree | None = None
    built_at: int | None = None
    pending: list[int] = field(default_factory=list)

    def observe(self, ranks: Sequence[int]) -> None:
        """Learns from committed tokens. ranks: of each, from 0; any larger number for a token that was not kept."""
        keep = (1 - 1 / MEMORY) ** len(ranks)
        self.tokens = self.tokens * keep + len(ranks)
        self.hits = [one * keep + ranks.count(rank) for rank, one in enumerate(self.hits)]
        self.pending = [*self.pending, *ranks][-TREE_TOKENS:]

    def build(self, position: int, price: float, scoring: "Sequence[float]") -> None:
        """Builds a new tree if the last one is old. scoring: V(0), V(1), ..., as far as is known."""
        if self.built_at is None or position - self.built_at > TREE_TOKENS:
            chances, nodes = [one / self.tokens for one in self.hits], len(scoring) - 2
            tree = best_tree(chances, price, scoring.__getitem__, max_nodes=nodes, max_depth=TREE_DEPTH)
            self.tree, self.built_at = (tree if tree.parents else None), position

    def decode_virtually(self) -> list[int]:
        """Tokens of each step in which the tree would have decoded the pending ones, which are used up."""
        steps, start = [], 0
        if self.tree is not None:
            below = {key: node for node, key in enumerate(zip(self.tree.parents, self.tree.ranks, strict=True))}
            while len(self.pending) - start > TREE_DEPTH + 1:
                node, count = -1, 0
                while (node := below.get((node, self.pending[start + count]), -2)) >= 0:
                    count += 1
                steps.append(count + 1)
                start += count + 1
        del self.pending[:start]
        return steps


def _bucket(match: int) -> int:
    return min(match.bit_length(), MATCH_BUCKETS) - 1


def _logit(chance: float) -> float:
    chance = min(max(chance, CLOSEST), 1 - CLOSEST)
    return math.log(chance / (1 - chance))


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))
