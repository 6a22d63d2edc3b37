"""How often drafts are accepted, learnt from those that were judged: by the drafter's confidence, or by the length of a match.

Both states are frozen; `observe` returns the next one. What is older counts less.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

PRIOR_SLOPE, PRIOR_OFFSET = 0.7, -0.3
"""Of the logit of acceptance in the logit of confidence, before anything was seen: drafters are surer than right."""
PRIOR_VARIANCES = (0.25, 1.0)
"""How far slope and offset may be from these, as variances. No later belief is less certain."""
MEMORY = 400.0
"""Observations after which one counts 1/e."""
SURE = 3e-4
"""Confidences nearer to 0 or 1 count as this near."""
LEAST_VARIANCE = 1e-3
"""Of one observation: what is all but certain still teaches."""
MOST_CORRELATION = 0.95
"""Between slope and offset."""
SLOPES, OFFSETS = (0.05, 3.0), (-6.0, 6.0)
"""Where the two are kept."""
PRIOR_ACCEPTANCE, PRIOR_WEIGHT = 0.6, 10.0
"""Mean acceptance before anything was seen, and how many observations it counts as."""


@dataclass(frozen=True, slots=True)
class Logistic:
    """P(accepted | confidence) = sigmoid(slope logit(confidence) + offset), learnt one draft at a time.

    The belief about (slope, offset) is Gaussian and follows every observation by one Newton step (a Laplace approximation), as
    in online Bayesian logistic regression (Spiegelhalter & Lauritzen, Networks 1990). variances and covariance: of the belief.
    mean: of the acceptances. weight: observations that the mean counts as."""

    slope: float = PRIOR_SLOPE
    offset: float = PRIOR_OFFSET
    variances: tuple[float, float] = PRIOR_VARIANCES
    covariance: float = 0.0
    mean: float = PRIOR_ACCEPTANCE
    weight: float = PRIOR_WEIGHT
    memory: float = MEMORY

    def predict(self, confidence: float) -> float:
        """The probability that a draft of this confidence, 0 to 1, is accepted."""
        return _sigmoid(self.slope * _logit(confidence) + self.offset)

    def observe(self, confidence: float, accepted: float) -> "Logistic":
        """A draft was judged. accepted: 0 or 1, or in sampling the probability with which it was."""
        return self.observe_all([(confidence, accepted)])

    def observe_all(self, drafts: Iterable[tuple[float, float]]) -> "Logistic":
        """Drafts were judged one after another. drafts: (confidence, accepted) as in `observe`."""
        slope, offset, covariance, mean, weight = self.slope, self.offset, self.covariance, self.mean, self.weight
        (slope_variance, offset_variance), keep = self.variances, 1 - 1 / self.memory
        (most_slope, most_offset), (slope_low, slope_high), (offset_low, offset_high) = PRIOR_VARIANCES, SLOPES, OFFSETS
        for confidence, accepted in drafts:
            place = _logit(confidence)
            predicted = _sigmoid(slope * place + offset)
            slope_gain, offset_gain = slope_variance * place + covariance, covariance * place + offset_variance
            shrink = 1 / (1 / max(predicted * (1 - predicted), LEAST_VARIANCE) + slope_gain * place + offset_gain)
            slope_variance = min((slope_variance - shrink * slope_gain * slope_gain) / keep, most_slope)
            offset_variance = min((offset_variance - shrink * offset_gain * offset_gain) / keep, most_offset)
            most = MOST_CORRELATION * math.sqrt(max(slope_variance * offset_variance, 0.0))
            covariance = min(max((covariance - shrink * slope_gain * offset_gain) / keep, -most), most)
            surprise, weight = accepted - predicted, weight * keep + 1
            slope = min(max(slope + (slope_variance * place + covariance) * surprise, slope_low), slope_high)
            offset = min(max(offset + (covariance * place + offset_variance) * surprise, offset_low), offset_high)
            mean += (accepted - mean) / weight
        return type(self)(slope, offset, (slope_variance, offset_variance), covariance, mean, weight, self.memory)


MATCHES = ((1, 0.25), (2, 0.35), (3, 0.45), (4, 0.6), (6, 0.75), (10, 0.85))
"""Buckets of matches: the tokens that a match of this bucket has at least, and the acceptance of its first draft before
anything was seen."""
SHORTEST = tuple(least for least, _ in MATCHES)
"""The first of these two."""
PRIOR_RISE = 0.02
"""By how much a later draft of a match is likelier to be accepted than the one before it, before anything was seen: who is
right so far is in a copied passage."""
MOST_PRIOR = 0.97
MATCH_PRIOR_WEIGHT = 4.0
"""Observations that such a prior counts as."""
MATCH_MEMORY = 300.0
"""Observations of a place after which one counts 1/e."""
PLACES = 24
"""Drafts of a match that are told apart."""


@dataclass(frozen=True, slots=True)
class Matches:
    """P(the i-th draft of a looked-up continuation is accepted | those before it are), by the length of the match.

    accepted, seen: [bucket][place], discounted counts.
    """

    accepted: tuple[tuple[float, ...], ...] = tuple(
        tuple(MATCH_PRIOR_WEIGHT * min(MOST_PRIOR, first + PRIOR_RISE * place) for place in range(PLACES))
        for _, first in MATCHES
    )
    seen: tuple[tuple[float, ...], ...] = ((MATCH_PRIOR_WEIGHT,) * PLACES,) * len(MATCHES)
    memory: float = MATCH_MEMORY

    def predict(self, match: int, most: int = PLACES) -> list[float]:
        """The acceptances of a match of so many tokens, place by place, of `most` at most. ValueError for no match."""
        bucket = _bucket(match)
        return [accepted / seen for accepted, seen in zip(self.accepted[bucket][:most], self.seen[bucket], strict=False)]

    def observe(self, match: int, right: int, looked_up: int) -> "Matches":
        """A match of so many tokens stood before text that is known by now, whether it was drafted or not. right: tokens of its
        continuation that the text has, up to the first that it has not. looked_up: tokens of the continuation."""
        bucket, keep = _bucket(match), 1 - 1 / self.memory
        accepted, seen = list(self.accepted[bucket]), list(self.seen[bucket])
        for place in range(min(right + 1, looked_up, PLACES)):
            accepted[place] = accepted[place] * keep + (place < right)
            seen[place] = seen[place] * keep + 1
        return Matches(_with(self.accepted, bucket, accepted), _with(self.seen, bucket, seen), self.memory)


def _bucket(match: int) -> int:
    if match < MATCHES[0][0]:
        raise ValueError(f"a match has at least {MATCHES[0][0]} token, found {match}")
    return bisect_right(SHORTEST, match) - 1


def _with(rows: tuple[tuple[float, ...], ...], index: int, row: list[float]) -> tuple[tuple[float, ...], ...]:
    return (*rows[:index], tuple(row), *rows[index + 1 :])


def _logit(chance: float) -> float:
    chance = min(max(chance, SURE), 1 - SURE)
    return math.log(chance / (1 - chance))


def _sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))
