"""`skipstone search --search bayesian`, Draft & Verify's search. Speeds are computed from the set, so no clock is involved."""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import bayes_opt
import pytest

from skipstone import SelfSpeculative
from skipstone.lab.search import search as layer_search
from skipstone.lab.search.bayesian import BayesianProposer, skipped_sublayers
from skipstone.lab.search.search import SearchResult, SearchSettings, search
from skipstone.lab.timing.measure import Measurement, MethodBackend
from tests.helpers.commandline import assert_refused, run, succeed
from tests.helpers.machine import llama, prompt

SETTINGS = SearchSettings([prompt(4), prompt(5, 1)], tokens=10, drafts=7, threshold=0.3, search="bayesian")
PLANTED = ((1, 3), (2, 4))  # attentions and MLPs of the fastest set
MIDDLE = 4  # layers that may be skipped, of 6


def seconds_a_token(method: Any) -> float:
    """Plain decoding has 1, the planted set .5. Every sublayer too many or too few costs a tenth."""
    if not isinstance(method, SelfSpeculative):
        return 1.0
    assert (method.num_speculative_tokens, method.confidence_threshold) == (7, 0.3)
    wrong = sum(len({*own} ^ {*best}) for own, best in zip((method.skip_attention, method.skip_mlp), PLANTED, strict=True))
    return 0.5 + 0.1 * wrong


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The methods that were measured, in order."""
    calls: list[Any] = []

    def measure(model: Any, engine: MethodBackend, text: Any, options: dict[str, Any], seed: int) -> Measurement:
        calls.append(engine.method)
        tokens = [0] * options["max_new_tokens"]
        return Measurement(tokens, seconds=len(tokens) * seconds_a_token(engine.method))

    monkeypatch.setattr(layer_search, "measure", measure)
    return calls


def searched(path: Path, *iterations: int) -> SearchResult:
    model = llama(layers=MIDDLE + 2)
    for number in iterations:
        found = search(model, SETTINGS, math.inf, path, iterations=number)
        assert len(found.trials) == number
    return found


def test_the_planted_set_is_found_and_every_trial_is_measured(measured: list[Any], tmp_path: Path) -> None:
    found = searched(tmp_path / "trials", 30)
    best = found.best
    assert best is not None
    assert (tuple(best.attention), tuple(best.mlp), best.speed) == (*PLANTED, pytest.approx(2.0))
    drafting = [method for method in measured if isinstance(method, SelfSpeculative)][:: len(SETTINGS.texts)]
    for trial, method in zip(found.trials, drafting, strict=True):
        assert trial.point is not None
        skipped = [place for place, number in enumerate(trial.point) if number > 0.5]
        assert trial.attention == [place + 1 for place in skipped if place < MIDDLE] == list(method.skip_attention)
        assert trial.mlp == [place + 1 - MIDDLE for place in skipped if place >= MIDDLE] == list(method.skip_mlp)
        assert trial.speed == pytest.approx(1 / seconds_a_token(method))
    assert [speed for _, speed in found.curve] == sorted(speed for _, speed in found.curve)


@pytest.mark.usefixtures("measured")
def test_a_search_in_parts_is_the_whole_search(tmp_path: Path) -> None:
    whole, parts = searched(tmp_path / "whole", 7), searched(tmp_path / "parts", 1, 4, 7)
    assert [(one.point, one.speed) for one in whole.trials] == [(one.point, one.speed) for one in parts.trials]
    with pytest.raises(ValueError, match="another search"):
        search(llama(layers=6), SearchSettings(SETTINGS.texts, 10, drafts=7, threshold=0.3), 1.0, tmp_path / "whole")


def test_proposals_are_those_of_the_package_with_the_released_constants() -> None:
    """A random point first, then the upper confidence bound with kappa = 2.576 and a noise of 1e-2."""
    proposer, seen = BayesianProposer(3, seed=5), list[tuple[Sequence[float], float]]()
    for number in range(5):
        acquisition = bayes_opt.acquisition.UpperConfidenceBound(kappa=2.576)
        bounds = dict.fromkeys("abc", (0, 1))
        package = bayes_opt.BayesianOptimization(None, bounds, acquisition, random_state=5 + number, verbose=0)
        package.set_gp_params(alpha=1e-2)
        for point, target in seen:
            package.register(list(point), target)
        point = proposer.propose()
        assert point == pytest.approx([*package.suggest().values()])
        seen.append((point, 1 - point[0] + point[1] ** 2))
        proposer.observe(*seen[-1])
    again = BayesianProposer(3, seed=5)
    for point, target in [*seen, *seen]:
        again.observe(point, target)
    assert len(again.propose()) == 3, "a point may be measured twice"


@pytest.mark.parametrize(
    ("point", "skipped"),
    [
        ([0.5, 0.501, 0.499, 1.0], [1, 3]),
        ([0.1, 0.3, 0.2, 0.0], [1]),  # none is above: the nearest is skipped
        ([0.9, 0.8, 0.6, 1.0], [0, 1, 3]),  # all are above: the nearest runs
    ],
)
def test_a_sublayer_is_skipped_above_one_half(point: list[float], skipped: list[int]) -> None:
    assert skipped_sublayers(point).nonzero()[0].tolist() == skipped


def test_the_command_has_the_papers_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """200 iterations (AdaDecode, appendix C), 12 drafts and the adaptive threshold (Draft & Verify), 32 tokens (its code)."""
    calls = list[tuple[Any, ...]]()

    def searching(model: Any, settings: SearchSettings, *limits: Any) -> SearchResult:
        calls.append((settings.search, limits[0], limits[-1], settings.drafts, settings.threshold, settings.tokens))
        return SearchResult([])

    monkeypatch.setattr(layer_search, "search", searching)
    for more in ((), ("--search", "bayesian"), ("--search", "bayesian", "--budget-seconds", 9), ("--iterations", 30)):
        assert_refused(run("search", "--prompt", "a", "--out", tmp_path / "out", *more), "0 trials are too few")
    ours, papers = ("linear_ts", 60, math.inf), ("bayesian", math.inf, 200)
    limits = [ours, papers, ("bayesian", 9, math.inf), ("linear_ts", math.inf, 30)]
    assert calls == [(*one, 12, "adaptive", 32) for one in limits]
    bayesian = ("search", "--search", "bayesian", "--prompt", "a", "--out", tmp_path / "out")
    assert_refused(run(*bayesian, "--skip-ratio", 0.4), "--skip-ratio has no effect")
    monkeypatch.setitem(sys.modules, "bayes_opt", None)
    assert_refused(run(*bayesian), '--search bayesian needs bayesian-optimization: pip install "skipstone[search]"')


def test_a_profile_is_written_with_its_curve(tmp_path: Path) -> None:
    out, curve = tmp_path / "found.json", tmp_path / "curve.png"
    common = ("--search", "bayesian", "--prompt", "a", "--max-new-tokens", 6, "--out", out, "--picture", curve)
    told = succeed("search", *common, "--iterations", 2).stdout
    assert "best of 2 sets decoded with (2 tried)" in told
    assert "acceptance rate" in told
    assert "matchness" not in told
    assert curve.read_bytes().startswith(b"\x89PNG")
    assert SelfSpeculative(profile=str(out)).profile == str(out)
