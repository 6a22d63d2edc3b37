"""The arithmetic of the benchmark against hand-computed values and scipy."""

import math

import numpy as np
import pytest
import scipy.stats
import torch

from skipstone.bench import machine, tuning
from skipstone.bench.measure import Measurement, Row
from skipstone.bench.peers import HFGenerate, HFPromptLookup
from skipstone.bench.prompts import Prompt
from skipstone.bench.report import Results, expectation, merged, own_figures
from skipstone.bench.statistics import bootstrap_rate, bootstrap_speedup, pooled, predicted_speedup, repeated_share
from skipstone.core.types import Stats, Step
from tests import families

LOOP = [7] * 12
FRESH = list(range(100, 112))


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
    estimate = bootstrap_speedup(tokens, seconds, tokens, base)
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
    ours = bootstrap_speedup(tokens, seconds, tokens, base)
    assert ours.low == pytest.approx(theirs.low, abs=0.01)
    assert ours.high == pytest.approx(theirs.high, abs=0.01)
    assert ours.low < ours.value < ours.high


def test_pairing_takes_the_difficulty_of_prompts_out_of_the_interval():
    rng = np.random.default_rng(1)
    base = rng.lognormal(0, 1, 40)
    seconds, tokens = base / 1.5, np.full(40, 96.0)
    paired = bootstrap_speedup(tokens, seconds, tokens, base)
    shuffled = bootstrap_speedup(tokens, rng.permutation(seconds), tokens, base)
    assert paired.high - paired.low < 1e-9 < 0.1 < shuffled.high - shuffled.low


def test_interval_covers_the_truth_as_often_as_it_says():
    rng, covered, trials = np.random.default_rng(2), 0, 400
    for trial in range(trials):
        base = rng.lognormal(0, 0.5, 40)
        seconds = base * rng.lognormal(-(0.2**2) / 2, 0.2, 40) / 1.3  # mean of the factor is 1: the true speed-up is 1.3
        estimate = bootstrap_speedup(np.ones(40), seconds, np.ones(40), base, seed=trial, resamples=400)
        covered += estimate.low <= 1.3 <= estimate.high
    assert 0.90 <= covered / trials <= 0.98  # 0.95 nominal, binomial deviation .011, small-sample undercoverage allowed for


def test_rate_interval_agrees_with_the_normal_approximation():
    hits = np.random.default_rng(3).binomial(90, 0.85, 64)
    estimate = bootstrap_rate(hits, [90.0] * 64)
    deviation = hits.std() / 90 / math.sqrt(64)
    assert estimate.value == pytest.approx(hits.sum() / (90 * 64))
    assert estimate.high - estimate.low == pytest.approx(2 * 1.96 * deviation, rel=0.1)


def test_bootstrap_refuses_unpaired_and_empty_columns():
    with pytest.raises(ValueError, match="same prompts on both sides"):
        bootstrap_speedup([1.0], [1.0], [1.0, 2.0], [1.0, 2.0])
    with pytest.raises(ValueError, match="at least one"):
        bootstrap_rate([], [])


def test_same_seed_same_interval():
    seconds, base = np.random.default_rng(0).lognormal(0, 0.3, (2, 20))
    estimates = [bootstrap_speedup([96] * 20, seconds, [96] * 20, base, seed=seed, resamples=100) for seed in (4, 4, 5)]
    assert estimates[0] == estimates[1] != estimates[2]


def test_prediction_is_the_expected_speedup_of_the_swift_paper():
    m, alpha, c, v, plain = 3.2, 0.7, 0.3, 1.15, 0.008
    draft_steps = (m - 1) / alpha
    step = draft_steps * c * plain + v * plain
    assert predicted_speedup(plain, m, step) == pytest.approx(m / ((m - 1) * c / alpha + v))


def test_rows_are_predicted_from_their_own_costs_with_the_prefill_apart():
    def stats(tokens, turns, draft, score, **more):
        return Stats(
            tokens=tokens, steps=turns, turns=turns, seconds_draft=draft, seconds_score=score, prefill_tokens=1, **more
        )

    plain = [Measurement("autoregressive", 0, [0] * 101, 1.5, stats(100, 100, 0.0, 0.9, seconds_prefill=0.5))]
    own = stats(100, 40, 0.2, 0.3, seconds_prefill=0.2, accepted=60, draft_steps=80, seconds_other=0.1)
    figures = expectation(own, [Measurement("layerskip", 0, [0] * 101, 0.85, own)], plain)
    assert figures["plain_ms_per_token"] == pytest.approx(10.0)  # (1.5 - .5) / 100: everything but the prefill
    assert figures["tokens_per_step"] == pytest.approx(2.5)
    assert figures["predicted_speedup"] == pytest.approx(0.01 * 2.5 / (0.5 / 40))
    assert figures["decode_speedup"] == pytest.approx(1.0 / 0.65)
    assert figures["measured_over_predicted"] == pytest.approx((1.0 / 0.65) / 2.0)
    shown = own_figures(own, 0.85)
    assert shown["draft_ms_per_step"] == pytest.approx(5.0)
    assert shown["score_ms_per_step"] == pytest.approx(7.5)
    assert shown["other_ms_per_step"] == pytest.approx(2.5)
    assert shown["untimed_share"] == pytest.approx((0.85 - 0.8) / 0.85)
    assert (shown["mean_acceptance_length"], shown["acceptance_rate"]) == (2.5, 0.75)


def test_statistics_of_several_calls_are_pooled():
    def call(accepted):
        stats, origin = Stats(), ["draft"] * accepted + ["bonus"]
        stats.add(Step([[5] * (accepted + 1)], [origin], [4], [4], [accepted], [0], seconds_draft=0.5))
        return stats

    total = merged([call(0), call(4), call(4)])
    assert (total.tokens, total.accepted, total.draft_steps, total.turns) == (11, 8, 12, 3)
    assert dict(total.histogram) == {0: 1, 4: 2}
    assert total.seconds_draft == 1.5


def test_headline_leaves_out_prompts_on_which_any_row_of_the_temperature_loops():
    rows = [Row("hf-generate", HFGenerate()), Row("hf-prompt-lookup", HFPromptLookup())]
    rows.append(Row("hf-generate T=0.8", HFGenerate(), 0.8))
    prompts = [Prompt("a", torch.tensor([1])), Prompt("b", torch.tensor([2]))]
    texts = {
        ("hf-generate", 0): FRESH,
        ("hf-generate", 1): FRESH,
        ("hf-prompt-lookup", 0): FRESH,
        ("hf-prompt-lookup", 1): LOOP,
    }
    texts |= {("hf-generate T=0.8", 0): FRESH, ("hf-generate T=0.8", 1): FRESH}
    seconds = {"hf-generate": 1.0, "hf-prompt-lookup": 0.5, "hf-generate T=0.8": 2.0}
    results = Results(rows, prompts, [Measurement(n, i, t, seconds[n] + i, None) for (n, i), t in texts.items()], seed=0)
    assert results.headline(0.0) == [0]
    assert results.headline(0.8) == [0, 1]
    lookup = results.per_row()[1]
    assert lookup["headline"]["speedup_hf_generate"]["value"] == pytest.approx(2.0)
    assert lookup["all_prompts"]["speedup_hf_generate"]["value"] == pytest.approx(3.0 / 2.0)
    assert (lookup["headline"]["equal_to_hf_generate"], lookup["all_prompts"]["equal_to_hf_generate"]) == (1, 1)
    assert lookup["all_prompts"]["repeated_share"] == pytest.approx((11 / 12) / 2)
    assert lookup["headline"]["speedup_autoregressive"] is None  # the row was not run
    assert results.per_row()[2]["headline"]["speedup_hf_generate"]["value"] == 1.0  # against its own temperature: itself
    assert results.figures(rows[0], []) is None


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

    def timed(model, row, prompt, index, max_new_tokens, seed):
        calls.append((row.engine.prompt_lookup_num_tokens, index))
        # number 4 is the fastest on every prompt but the first, where 7 has a lucky moment
        seconds = 0.5 if calls[-1] == (7, 0) else 1.0 + abs(row.engine.prompt_lookup_num_tokens - 4) / 10
        return Measurement(row.name, index, [0] * max_new_tokens, seconds)

    monkeypatch.setattr(tuning, "measure", timed)
    candidates = [HFPromptLookup(number) for number in range(1, 10)]
    best, trials = tuning.tune(families.cached("llama"), candidates, [torch.tensor([1])] * 6, 8, seed=0)
    assert best == HFPromptLookup(4)
    assert len(calls) == tuning.budget(9, 6) == 30
    assert sorted(len(trial.tokens) for trial in trials) == [2] * 6 + [6] * 3
    assert trials[0].speed == pytest.approx(8.0)
    first = [number for number, index in calls if index == 0]
    assert sorted(first) == list(range(1, 10)) != first  # everybody's turn, in shuffled order


def test_grid_is_the_same_for_ours_and_for_the_peer():
    grid = tuning.Grid(tuning.exit_layers(16))
    ours = {(e.settings["exit_layer"], e.settings["num_speculative_tokens"]) for e in grid.layerskip()}
    peer = {(e.settings["exit_layer"], e.settings["num_assistant_tokens"]) for e in grid.early_exit()}
    assert ours == peer
    assert {layer for layer, _ in ours} == {2, 3, 4, 6, 8}
    assert {e.settings["confidence_threshold"] for e in grid.layerskip()} == {None, 0.2, 0.3, 0.4, 0.5, 0.6}
    assert {e.settings["confidence_threshold"] for e in grid.early_exit()} >= {0.0, 0.4}
    assert tuning.exit_layers(2) == [1]


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
