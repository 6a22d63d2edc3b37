"""The arithmetic of the benchmark against hand-computed values and scipy."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from skipstone.bench import tuning
from skipstone.bench.peers import HFPromptLookup
from skipstone.timing import machine
from skipstone.timing.measure import Measurement, options_for
from skipstone.timing.statistics import BLOCKS, Estimate, pooled, predicted_speedup, rate, repeated_share
from tests.helpers import families


def speed_up(tokens, seconds, base_tokens, base_seconds, **more) -> Estimate:
    """The paired ratio of two pooled rates."""
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


def test_repeated_share_counts_8_grams_unless_told():
    text = [1, 2, 3, 4, 5, 6, 7]
    assert repeated_share(text, text) == 0.0  # 7-grams only, apart from nothing
    assert repeated_share([*text, 8], [*text, 8]) == 1.0


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


def test_pairing_takes_the_difficulty_of_prompts_out_of_the_interval():
    rng = np.random.default_rng(1)
    base = rng.lognormal(0, 1, 40)
    seconds, tokens = base / 1.5, np.full(40, 96.0)
    paired = speed_up(tokens, seconds, tokens, base)
    shuffled = speed_up(tokens, rng.permutation(seconds), tokens, base)
    assert paired.high - paired.low < 1e-9 < 0.1 < shuffled.high - shuffled.low


def test_interval_covers_the_truth_as_often_as_it_says():
    rng, covered, trials = np.random.default_rng(2), 0, 400
    for trial in range(trials):
        base = rng.lognormal(0, 0.5, 40)
        seconds = base * rng.lognormal(-(0.2**2) / 2, 0.2, 40) / 1.3  # mean of the factor is 1: the true speed-up is 1.3
        estimate = speed_up(np.ones(40), seconds, np.ones(40), base, seed=trial, resamples=400)
        covered += estimate.low <= 1.3 <= estimate.high
    assert 0.90 <= covered / trials <= 0.98  # 0.95 nominal, binomial deviation .011, small-sample undercoverage allowed for


def test_rate_interval_agrees_with_the_normal_approximation():
    hits = np.random.default_rng(3).binomial(90, 0.85, 64)
    estimate = rate(hits, [90.0] * 64).estimate()
    deviation = hits.std() / 90 / math.sqrt(64)
    assert estimate.value == pytest.approx(hits.sum() / (90 * 64))
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * deviation, rel=0.1)


def test_bootstrap_refuses_unpaired_and_empty_columns():
    with pytest.raises(ValueError, match="same prompts on both sides"):
        speed_up([1.0], [1.0], [1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        rate([], [])


def test_same_seed_same_interval():
    seconds, base = np.random.default_rng(0).lognormal(0, 0.3, (2, 20))
    estimates = [speed_up([96] * 20, seconds, [96] * 20, base, seed=seed, resamples=100) for seed in (4, 4, 5)]
    assert estimates[0] == estimates[1] != estimates[2]


def test_prediction_is_the_expected_speedup_of_the_swift_paper():
    m, alpha, c, v, plain = 3.2, 0.7, 0.3, 1.15, 0.008
    draft_steps = (m - 1) / alpha
    step = draft_steps * c * plain + v * plain
    assert predicted_speedup(plain, m, step) == pytest.approx(m / ((m - 1) * c / alpha + v))


@pytest.mark.parametrize(
    ("candidates", "prompts", "plan", "calls"),
    [
        (9, 6, [(9, [0, 1]), (3, [2, 3, 4, 5])], 30),
        (3, 4, [(3, [0, 1, 2, 3])], 12),
        (150, 6, [(150, [0, 1]), (50, [2, 3]), (17, [4, 5])], 434),
        (4, 1, [(4, [0])], 4),
        (1, 6, [], 0),
    ],
)
def test_budget_of_tuning_is_known_beforehand(candidates, prompts, plan, calls):
    assert [(count, list(span)) for count, span in tuning.rungs(candidates, prompts)] == plan
    assert tuning.budget(candidates, prompts) == calls


def test_tuning_finds_the_fastest_and_spends_its_budget(monkeypatch):
    calls = []

    def timed(model, engine, prompt, options, seed):
        calls.append((engine.prompt_lookup_num_tokens, seed))  # the prompt's number is added to the seed, 0
        # number 4 is the fastest on every prompt but the first, where 7 has a lucky moment
        seconds = 0.5 if calls[-1] == (7, 0) else 1.0 + abs(engine.prompt_lookup_num_tokens - 4) / 10
        return Measurement([0] * options["max_new_tokens"], seconds)

    monkeypatch.setattr(tuning, "measure", timed)
    candidates = [HFPromptLookup(number) for number in range(1, 10)]
    best, trials = tuning.tune(families.cached("llama"), candidates, [torch.tensor([1])] * 6, options_for(8), seed=0)
    assert best == HFPromptLookup(4)
    assert len(calls) == tuning.budget(9, 6) == 30
    assert sorted(len(trial.tokens) for trial in trials) == [2] * 6 + [6] * 3
    assert trials[0].speed == pytest.approx(8.0)
    first = [number for number, index in calls if index == 0]
    assert sorted(first) == list(range(1, 10)) != first  # everybody's turn, in shuffled order


def test_the_usual_values_are_the_same_for_ours_and_for_the_peer():
    ours, peer = (tuning.usual(name, 16) for name in ("layerskip", "hf-early-exit"))
    assert ours["exit_layer"] == peer["exit_layer"] == [2, 3, 4, 6, 8]
    assert ours["num_speculative_tokens"] == peer["num_assistant_tokens"]
    assert set(ours["confidence_threshold"]) == {None, 0.2, 0.3, 0.4, 0.5, 0.6}
    assert set(peer["confidence_threshold"]) >= {0.0, 0.4}
    assert tuning.exit_layers(2) == [1]
    assert tuning.usual("autoregressive", 16) == {}


def test_ceiling_counts_the_bytes_that_a_token_reads():
    model = families.build("llama", vocab=50)
    total = sum(p.numel() for p in model.parameters()) * 4
    assert machine.weight_bytes(model) == total - 50 * 32 * 4  # of an embedding table of its own a token reads one row
    tied = families.build("llama", vocab=50, tie_word_embeddings=True)
    assert machine.weight_bytes(tied) == total - 50 * 32 * 4  # the head reads the shared table
    assert machine.kv_bytes(model) == 2 * 4 * 2 * 8 * 4  # keys and values x layers x heads x dimensions x float32
    found = machine.ceiling(model, mean_length=10.0, megabytes=4)
    read = total - 50 * 32 * 4 + 10 * 512
    assert found["tokens_per_second"] == pytest.approx(found["bandwidth_gb_per_second"] * 1e9 / read)


def test_provenance_names_the_versions_and_the_command():
    found = machine.provenance(["bench", "model", "--quick"], seed=3)
    assert found["packages"]["torch"] == torch.__version__
    assert found["argv"] == ["bench", "model", "--quick"]
    assert (found["seed"], found["threads"]) == (3, torch.get_num_threads())


def test_pooled_rate_of_nothing_is_not_a_number():
    assert math.isnan(pooled([], []))
    assert pooled([1, 2], [2, 2]) == 0.75


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
