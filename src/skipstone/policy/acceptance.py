"""How often drafts are accepted: by the drafter's confidence, by the length of a match, by the rank of a kept token.

All three learn from drafts that were judged. Older ones count less.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from skipstone.policy.draft_length import MAX_DRAFTS, RankTree, best_tree

PRIOR_SLOPE, PRIOR_OFFSET = 0.7, -0.3
"""Logit of acceptance = slope x logit of confidence + offset, before anything was seen: drafters are overconfident."""
PRIOR_VARIANCES = (0.25, 1.0)  # of slope and offset around these; no later belief is less certain
CLOSEST = 3e-4  # confidences closer than this to 0 or 1 count as this close, as in the native engine's chain
PRIOR_ACCEPTANCE = 0.6  # mean acceptance before anything was seen: the middle of .42 to .86, the drafters' means in docs/lab
MATCH_DOUBT = 3.0
"""A match of m tokens continues rightly with probability m / (m + 3), before anything was seen: .25 at 1, .77 at 10. After i
right tokens it is m + i long."""
PRIOR_WEIGHT = 10.0  # judged drafts or tokens that each of these priors counts as
MEMORY = 400.0  # judged drafts or tokens after which one counts 1/e: a request or two
MATCH_BUCKETS = 4  # matches of 1, 2 to 3, 4 to 7 and at least 8 tokens are told apart
FIRST_RANK, RANKS = 0.4, 5
"""Probability that the token kept first for a token follows it, half as often the second, and so on for five ranks, before
anything was seen (docs/lab: .38 to .52 on text that is not poetry)."""
TREE_TOKENS, TREE_DEPTH = 200, 6  # tokens until the tree is built anew, and its depth: seven in a row are hardly ever kept


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
        """The probability that a draft of this confidence, 0 to 1, is accepted."""
        return _sigmoid(self.slope * _logit(confidence) + self.offset)

    def observe(self, drafts: Iterable[tuple[float, bool]]) -> None:
        """Drafts were judged: (confidence, accepted)."""
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

    accepted, judged: [bucket][place], discounted counts.
    """

    accepted: list[list[float]] = field(
        default_factory=lambda: [[_match_prior(2**b + i) for i in range(MAX_DRAFTS)] for b in range(MATCH_BUCKETS)]
    )
    judged: list[list[float]] = field(default_factory=lambda: [[PRIOR_WEIGHT] * MAX_DRAFTS for _ in range(MATCH_BUCKETS)])

    def predict(self, match: int, max_drafts: int) -> list[float]:
        """Survivals: the probabilities that the first 1, 2, ... tokens of the continuation are all right."""
        bucket, survival, found = _bucket(match), 1.0, []
        for accepted, judged in zip(self.accepted[bucket][:max_drafts], self.judged[bucket], strict=False):
            survival *= accepted / judged
            found.append(survival)
        return found

    def observe(self, match: int, right: int, told: int) -> None:
        """The text behind a match is known. right: tokens of the continuation that it has, up to the first that it has not.
        told: tokens of the continuation that it tells of."""
        accepted, judged, keep = self.accepted[_bucket(match)], self.judged[_bucket(match)], 1 - 1 / MEMORY
        for place in range(min(right + 1, told, MAX_DRAFTS)):
            accepted[place] = accepted[place] * keep + (place < right)
            judged[place] = judged[place] * keep + 1


@dataclass(slots=True)
class RankAcceptance:
    """How often the token that was kept first, second, ... for a token followed it, and the tree of drafts that this makes.

    pending: ranks of committed tokens that the tree has not virtually decoded yet.
    """

    hits: list[float] = field(default_factory=lambda: [PRIOR_WEIGHT * FIRST_RANK / 2**rank for rank in range(RANKS)])
    tokens: float = PRIOR_WEIGHT
    tree: RankTree | None = None
    built_at: int | None = None
    pending: list[int] = field(default_factory=list)

    def observe(self, ranks: Sequence[int]) -> None:
        """Tokens were committed. ranks: of each, from 0; any larger number for a token that was not kept."""
        keep = (1 - 1 / MEMORY) ** len(ranks)
        self.tokens = self.tokens * keep + len(ranks)
        self.hits = [one * keep + ranks.count(rank) for rank, one in enumerate(self.hits)]
        self.pending = [*self.pending, *ranks][-TREE_TOKENS:]

    def build(self, position: int, price: float, scoring: "Sequence[float]") -> None:
        """Builds the tree anew where it is old. scoring: V(0), V(1), ..., as far as is known."""
        if self.built_at is None or position - self.built_at > TREE_TOKENS:
            chances, nodes = [one / self.tokens for one in self.hits], len(scoring) - 2
            tree = best_tree(chances, price, scoring.__getitem__, max_nodes=nodes, max_depth=TREE_DEPTH)
            self.tree, self.built_at = (tree if tree.parents else None), position

    def decode_virtually(self) -> list[int]:
        """Tokens that each step of the tree would have committed of the pending ones, which are used up."""
        found, start = [], 0
        if self.tree is not None:
            below = {key: node for node, key in enumerate(zip(self.tree.parents, self.tree.ranks, strict=True))}
            while len(self.pending) - start > TREE_DEPTH + 1:
                node, count = -1, 0
                while (node := below.get((node, self.pending[start + count]), -2)) >= 0:
                    count += 1
                found.append(count + 1)
                start += count + 1
        del self.pending[:start]
        return found


def _match_prior(length: int) -> float:
    return PRIOR_WEIGHT * length / (length + MATCH_DOUBT)


def _bucket(match: int) -> int:
    return min(match.bit_length(), MATCH_BUCKETS) - 1


def _logit(chance: float) -> float:
    chance = min(max(chance, CLOSEST), 1 - CLOSEST)
    return math.log(chance / (1 - chance))


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))
