"""Settings by measurement: the budget, the fastest, and what is tried."""

import pytest
import torch

from skipstone.bench import tuning
from skipstone.bench.peers import HFPromptLookup
from skipstone.timing.measure import Measurement, options_for
from tests.helpers import families


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
    best, trials = tuning.tune(
        families.cached("llama"), candidates, [torch.tensor([1])] * 6, options_for(8), 0, lambda *_: None, {}
    )
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
    assert tuning.usual("layerskip", 2)["exit_layer"] == [1]
    assert tuning.usual("autoregressive", 16) == {}
