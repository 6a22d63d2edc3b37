"""`skipstone search`: layer sets judged and decoded with, a file of trials that a search goes on with, the profile."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.search import search as layer_search
from skipstone.lab.search.search import LayerSetResult, SearchResult, SearchSettings, search
from skipstone.models.passes import SkipSet
from tests.helpers import support
from tests.helpers.commandline import assert_refused, run, succeed
from tests.helpers.machine import llama, prompt, silenced

SKIP = SkipSet(frozenset({1, 2}), frozenset({2}))
SETTINGS = SearchSettings([prompt(9), prompt(5, 1)], tokens=12, ratios=(0.25, 0.5), drafts=4)


class Clock:
    """Every look at it takes a tenth of a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        self.now += 0.1
        return self.now


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(layer_search, "time", Clock())
    monkeypatch.setattr(
        layer_search, "_decoded", lambda model, settings, skip: (1 + len(skip.attention) + len(skip.mlp) / 2, 0.5)
    )
    return llama(layers=6)


def test_matchness_is_the_share_of_tokens_that_what_is_left_would_have_chosen() -> None:
    """Against transformers: the prompt but its last token by the whole model, the rest by a copy with silenced sublayers."""
    model, asked = llama(layers=6), prompt(9)
    text = layer_search._SearchText(ModelRunner(model), asked, 20)
    assert text.matchness(SkipSet()) == 1
    with torch.inference_mode():
        cache = model(text.ids[:, :8], use_cache=True).past_key_values
        said = silenced(model, SKIP)(text.ids[:, 8:-1], past_key_values=cache).logits[0].argmax(-1)
    wanted = (said == text.ids[0, 9:]).double().mean().item()
    assert text.matchness(SKIP) == pytest.approx(wanted)
    assert wanted < 1


def test_a_search_ends_with_its_budget_and_goes_on_with_a_larger_one(model: Any, tmp_path: Path) -> None:
    path, seen = tmp_path / "trials", list[int]()
    found = search(model, SETTINGS, 8.0, path, lambda found, spent: seen.append(len(found.trials)))
    assert seen == list(range(1, len(found.trials) + 1))
    assert [one.kind for one in found.trials[:14]] == ["judged"] * 12 + ["decoded", "judged"]
    assert {len(one.attention) + len(one.mlp) for one in found.trials} == {2, 4}, "the ratios take turns"
    assert found.best is not None
    assert found.best.speed == max(one.speed or 0 for one in found.trials)
    assert [speed for _, speed in found.curve] == sorted(speed for _, speed in found.curve)
    assert search(model, SETTINGS, 8.0, path).trials == found.trials, "the budget was spent"
    path.write_text(path.read_text() + '{"kind": "jud')
    more = search(model, SETTINGS, 16.0, path)
    assert more.trials[: len(found.trials)] == found.trials
    assert len(more.trials) > len(found.trials)
    assert len(path.read_text().splitlines()) == 1 + len(more.trials)


def test_trials_of_another_search_are_refused(model: Any, tmp_path: Path) -> None:
    path = tmp_path / "trials"
    search(model, SETTINGS, 1.0, path)
    with pytest.raises(ValueError, match="holds the trials of another search"):
        search(model, SearchSettings(SETTINGS.texts, tokens=13), 1.0, path)
    path.write_text("{}\nno\n")
    with pytest.raises(ValueError, match="is no file of trials"):
        search(model, SETTINGS, 1.0, path)
    with pytest.raises(ValueError, match="at least 4 layers, found 3"):
        search(llama(layers=3), SETTINGS, 1.0, tmp_path / "other")


def test_the_best_set_is_that_of_the_best_mean_not_the_luckiest() -> None:
    lucky = [LayerSetResult("decoded", [1], [], 0.9, second, speed) for second, speed in ((1.0, 1.5), (3.0, 0.9))]
    steady = [LayerSetResult("decoded", [2], [], 0.9, second, 1.3) for second in (2.0, 4.0)]
    best = SearchResult([lucky[0], steady[0], lucky[1], steady[1]]).best
    assert best is not None
    assert (best.attention, best.speed) == ([2], 1.3)
    assert SearchResult([lucky[0], steady[0], lucky[1], steady[1]]).curve == [(1.0, 1.5), (2.0, 1.5), (3.0, 1.3), (4.0, 1.3)]


def test_a_profile_is_found_and_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_search, "PER_DECODE", 1)
    monkeypatch.setattr(layer_search, "time", Clock())  # as many trials on every machine
    folder, out = tmp_path / "model", tmp_path / "found.json"
    model = llama(layers=6)
    model.save_pretrained(folder)
    support.tokenizer().save_pretrained(folder)
    asked = ("search", folder, "--prompt", "abc", "--max-new-tokens", 8, "--out", out, "--picture", tmp_path / "curve.png")
    told = succeed(*asked, "--budget-seconds", 4).stdout
    assert "x plain decoding" in told
    assert f'--method "self_speculative profile={out}"' in told
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    same, other = tmp_path / "same.jsonl", tmp_path / "other.jsonl"
    same.write_text('{"prompt": "abc"}\n')
    other.write_text('{"prompt": "abc"}\n{"text": "abd"}\n')
    from_file = ["--prompts" if one == "--prompt" else same if one == "abc" else one for one in asked]
    assert succeed(*from_file, "--budget-seconds", 4).stdout == told, "the same search, which is over"
    assert_refused(run(*from_file, "--prompts", other, "--budget-seconds", 4), "another search")
    assert_refused(run(*from_file, "--prompt", "abc"), "give either --prompt or --prompts, found both")
    profile = json.loads(out.read_text())
    assert profile["attention"] or profile["mlp"]
    network, _ = skipstone.load(folder)
    plain = skipstone.generate(network, prompt(9), "autoregressive", max_new_tokens=20, do_sample=False)
    drafted = skipstone.generate(
        network, prompt(9), skipstone.SelfSpeculative(profile=str(out)), max_new_tokens=20, do_sample=False
    )
    assert drafted.new_tokens == plain.new_tokens
    assert drafted.stats is not None
    assert drafted.stats.drafted > 0
    assert_refused(run("search", folder, "--skip-ratio", "1.5"), "--skip-ratio must lie between 0 and 1, found 1.5")
