"""The arithmetic of the benchmark against hand-computed values and scipy."""

import numpy as np
import pytest
import scipy.stats

from skipstone.lab.timing.statistics import BLOCKS, IntervalEstimate, mean, rate, repeated_share


def speed_up(tokens, seconds, base_tokens, base_seconds, **more) -> IntervalEstimate:
    return (rate(tokens, seconds, **more) / rate(base_tokens, base_seconds, **more)).estimate()


@pytest.mark.parametrize(
    ("prompt", "output", "n", "share"),
    [
        ([1, 2], [3, 1, 2], 2, 2 / 3),  # (1, 2) again at the end: the last two tokens
        ([5, 6, 7, 5], [6, 7], 3, 1.0),  # the repeated 3-gram begins in the prompt and covers both output tokens
        ([], [1, 2, 1, 2, 1, 2], 2, 4 / 6),  # overlapping occurrences
        ([], [4] * 10, 8, 0.9),  # the 8-gram from index 1 on is the one from index 0
        ([1, 2, 3, 4, 5, 6, 7], [9, 1, 2, 3, 4, 5, 6, 7], 8, 0.0),  # seven tokens in a row are not eight
        ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 4, 5, 6, 7, 8], 8, 1.0),
        ([1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7, 8], [30, 31], 8, 0.0),  # repeats inside the prompt do not count
        ([1, 2, 3], [], 8, 0.0),
    ],
)
def test_share_of_repeated_ngrams(prompt, output, n, share):
    assert repeated_share(prompt, output, n) == pytest.approx(share, abs=1e-12)


def test_speedup_is_total_over_total_and_not_a_mean_of_ratios():
    tokens, seconds, base = [100, 100], [1.0, 9.0], [2.0, 9.0]
    estimate = speed_up(tokens, seconds, tokens, base)
    assert estimate.value == pytest.approx(11 / 10)  # the mean of the prompts' ratios would be 1.5
    assert (estimate.low, estimate.high) == (pytest.approx(1.0), pytest.approx(2.0))  # one prompt twice, at either end


def test_paired_interval_agrees_with_scipy():
    rng = np.random.default_rng(0)
    tokens = rng.integers(50, 100, 25).astype(float)
    base = tokens / 100 * rng.lognormal(0, 0.3, 25)
    seconds = base / 1.3 * rng.lognormal(0, 0.1, 25)

    def statistic(t, s, b):
        return (t.sum() / s.sum()) / (t.sum() / b.sum())

    theirs = scipy.stats.bootstrap(
        (tokens, seconds, base), statistic, paired=True, vectorized=False, n_resamples=10_000, method="percentile", rng=rng
    ).confidence_interval
    ours = speed_up(tokens, seconds, tokens, base)
    assert ours.low == pytest.approx(theirs.low, abs=0.01)
    assert ours.high == pytest.approx(theirs.high, abs=0.01)
    assert ours.low < ours.value < ours.high


@pytest.mark.parametrize(("passed", "count"), [(0, 5), (5, 5), (1, 2), (57, 90), (115, 120)])
def test_a_share_has_wilsons_interval(passed, count):
    theirs = scipy.stats.binomtest(passed, count).proportion_ci(0.95, "wilson")
    ours = mean([1.0] * passed + [0.0] * (count - passed))
    assert (ours.value, ours.low, ours.high) == pytest.approx((passed / count, theirs.low, theirs.high), abs=1e-12)


def test_a_mean_of_other_scores_has_a_bootstrap_interval():
    values = np.random.default_rng(1).random(60)
    theirs = scipy.stats.bootstrap((values,), np.mean, method="percentile", rng=np.random.default_rng(0)).confidence_interval
    ours = mean(values)
    assert (ours.value, ours.low, ours.high) == pytest.approx((values.mean(), theirs.low, theirs.high), abs=0.005)
    with pytest.raises(ValueError, match="at least one"):
        mean([])


def test_bootstrap_refuses_unpaired_and_empty_columns():
    with pytest.raises(ValueError, match="same prompts on both sides"):
        speed_up([1.0], [1.0], [1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        rate([], [])


def test_many_units_are_resampled_in_blocks_to_the_same_interval():
    rng = np.random.default_rng(5)
    base = rng.lognormal(0, 0.5, 4 * BLOCKS)
    seconds = base * rng.lognormal(0, 0.2, 4 * BLOCKS) / 1.3
    tokens = np.full(4 * BLOCKS, 64.0)
    blocked = speed_up(tokens, seconds, tokens, base, resamples=2000)
    weights = rng.multinomial(4 * BLOCKS, np.full(4 * BLOCKS, 1 / (4 * BLOCKS)), size=2000)
    low, high = np.quantile((weights @ base) / (weights @ seconds), [0.025, 0.975])
    assert blocked.value == pytest.approx(base.sum() / seconds.sum())
    assert blocked.low == pytest.approx(low, abs=0.003)
    assert blocked.high == pytest.approx(high, abs=0.003)
