"""SWIFT and Draft & Verify beyond the conformance suite: what a layer set computes, trees, what is learnt, what is refused."""

import copy
import gc
import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import skipstone
from skipstone import Autoregressive, Sampling, SelfSpeculative, Swift
from skipstone.decoding.draft import Draft
from skipstone.decoding.request import Request
from skipstone.engines.model_runner import ModelRunner
from skipstone.methods.drafting.layer_sets import load_profile, save_profile
from skipstone.methods.swift.layer_set_optimisation import LayerSetOptimisation
from skipstone.methods.swift.layer_set_search import SwiftSearch
from skipstone.methods.swift.tree import max_leaves, offered, with_leaves
from skipstone.models.fingerprint import fingerprint
from skipstone.models.passes import SkipSet
from tests.helpers import families
from tests.helpers.machine import decode, llama, prompt, running, silenced
from tests.helpers.support import assert_as_plain

SKIP = SkipSet(frozenset({1, 2}), frozenset({2}))
METHOD = Swift(0.5, 4, context_window=6)
pytestmark = pytest.mark.filterwarnings("ignore:.*x the speed of plain decoding:RuntimeWarning")


@pytest.mark.usefixtures("no_gradients")
@pytest.mark.parametrize("window", ["latest", "first"])
def test_a_layer_set_is_judged_by_its_tokens_after_the_targets_own_prefix(window: str, monkeypatch: Any) -> None:
    """Against transformers: the prefix by the whole model, the window by a copy in which skipped sublayers write nothing."""
    monkeypatch.setattr(SwiftSearch, "window", window)
    model, judged = llama(layers=6), []
    monkeypatch.setattr(LayerSetOptimisation, "evaluated", lambda _, *arguments: judged.append(arguments))
    decoder, ids = running(model, METHOD, steps=14)
    session: Any = decoder.session
    end = session.store.length[0]
    begin = 9 if window == "first" else end - 6
    with monkeypatch.context() as patch:
        patch.setattr(LayerSetOptimisation, "candidate", lambda self: self.space.from_skip_set(SKIP))
        session.drafter.run_background_work()
        session.drafter.observe_commits(None, [])
    cache = model(ids[None, :begin], use_cache=True).past_key_values
    predicted = silenced(model, SKIP)(ids[None, begin : begin + 6], past_key_values=cache).logits[0].argmax(-1)
    right = int((predicted == ids[begin + 1 : begin + 7]).sum())
    assert 0 < right < 6
    assert judged[-1][1:] == (right / 6, 6)
    session.check(0, ids[: end + 1])


@pytest.mark.usefixtures("no_gradients")
def test_drafts_are_the_greedy_text_of_the_other_layers() -> None:
    """They read the target's keys and values of committed tokens, and their own of the draft."""
    model = llama(layers=6)
    decoder, ids = running(model, SelfSpeculative((1, 2), (2,), None, 5, None), steps=3)
    session: Any = decoder.session
    draft, end = session.drafter.propose_draft([5]), session.store.length[0]
    cache = model(ids[None, :end], use_cache=True).past_key_values
    short, token, expected = silenced(model, SKIP), ids[None, end : end + 1], []
    for _ in range(5):
        token = short(token, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)
        expected.append(token.item())
    assert draft.tokens[0].tolist() == expected


def chain(tokens: list[list[int]], confidence: list[list[float]], valid: list[list[bool]] | None = None) -> Draft:
    made = torch.tensor(tokens)
    all_valid = torch.ones_like(made, dtype=torch.bool) if valid is None else torch.tensor(valid)
    return Draft(made, all_valid, None, confidence=torch.tensor(confidence))


COUNTS = (10, 5, 3, 1)


def test_runners_up_are_leaves_of_the_places_before_theirs() -> None:
    """A place offers more tokens if it is less sure."""
    sure = torch.tensor([[0.1, 0.5, 0.51, 0.8, 0.81, 0.95, 0.96, 1.0]])
    assert offered(sure, COUNTS).tolist() == [[10, 10, 5, 5, 3, 3, 1, 1]]
    ranked = torch.tensor([[[7, 8, 9, 1], [5, 6, 7, 2], [3, 4, 8, 9]]])
    possible = torch.ones_like(ranked, dtype=torch.bool)
    possible[0, 1, 2] = False
    tree: Any = with_leaves(chain([[7, 5, 3]], [[0.97, 0.6, 0.9]]), ranked, possible, COUNTS, 9)
    tree.check()
    nodes = sorted(zip(tree.parents[0].tolist(), tree.tokens[0].tolist(), strict=True))
    assert nodes == [(-1, 7), (0, 2), (0, 5), (0, 6), (1, 3), (1, 4), (1, 8)]
    assert tree.tokens[0].tolist() == [7, 5, 3, 6, 2, 4, 8], "the chain comes first, then leaves by place and rank"
    assert (tree.draft_steps.tolist(), tree.levels) == ([3], 3)
    ranked = torch.arange(2 * 9 * 10).view(2, 9, 10)
    ragged = chain(ranked[:, :, 0].tolist(), [[0.5] * 9] * 2, [[True] * 9, [True] * 2 + [False] * 7])
    every = torch.ones_like(ranked, dtype=torch.bool)
    assert with_leaves(ragged, ranked, every, COUNTS, 81).valid.sum(1).tolist() == [90, 20]
    assert with_leaves(ragged, ranked, every, COUNTS, 10).valid.sum(1).tolist() == [19, 12]


@pytest.mark.parametrize(
    ("threshold", "counts", "leaves"),
    [
        (0.8, COUNTS, 24 * 2 + 9),
        (0.8, (10, 8, 5, 3), 24 * 4 + 9),
        (0.79, COUNTS, 24 * 4 + 9),
        (0.96, COUNTS, 9),
        (None, COUNTS, 225),
    ],
)
def test_no_tree_has_more_runners_up_than_its_chain_can_have(threshold: Any, counts: Any, leaves: int) -> None:
    """Every place but the last is at least as sure as the threshold."""
    assert max_leaves(25, threshold, counts) == leaves


def test_leaves_are_accepted_and_their_keys_and_values_moved() -> None:
    """More tokens a step than chains commit, the same text, and a store that passes its check after every step."""
    runner, asked, lengths = ModelRunner(llama(layers=6, head=3.0)), [Request(prompt(9), 60)], []
    for dynamic in (True, False):
        method = Swift(0.5, 5, None, 6, search="uniform", dynamic_verification=dynamic)
        texts, stats, _ = decode(method, runner, asked, check=True)
        assert texts == decode(Autoregressive(), runner, asked)[0]
        lengths.append(stats.mean_acceptance_length)
    assert lengths[0] > lengths[1] > 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_of_any_temperature_share_trees_that_are_drawn(temperature: float) -> None:
    """Greedy rows keep the text of plain decoding under the standard rule, next to rows that sample."""
    runner, method = ModelRunner(llama(layers=6, head=3.0)), Swift(0.5, 5, None, 6, rejection_sample_method="standard")
    asked = [Request(prompt(9), 40), Request(prompt(6), 40, sampling=Sampling(temperature, seed=1))]
    texts, stats, _ = decode(method, runner, asked, check=True)
    assert texts[0] == decode(Autoregressive(), runner, asked[:1])[0][0]
    assert stats.drafted > stats.accepted > 20


def test_the_release_gives_the_greedy_text() -> None:
    """Its start, every second layer, drafts until a candidate has a score. int(8 * .45) = 3 sublayers."""
    pytest.importorskip("bayes_opt")
    runner, method = ModelRunner(llama(layers=6)), Swift(preset="release")  # type: ignore[call-arg]
    assert_as_plain(runner.model, prompt(9), method, max_new_tokens=80, do_sample=False)
    found = method.report(runner.model)
    assert found["history"][0]["attention"] == found["history"][0]["mlp"] == [1, 3]
    assert (found["evaluations"] > 0, sum(map(len, found["skipped"].values()))) == (True, 3)


def test_a_state_lives_as_long_as_its_model_and_serves_every_request() -> None:
    model, method, other = llama(layers=6), Swift(0.5, 4, context_window=6), Swift(0.5, 4, context_window=6, search_seed=9)
    steps, texts = [0], []
    for one in (method, method, other):
        assert one.report(model) == {} or one is method
        texts.append(skipstone.generate(model, prompt(9), one, max_new_tokens=40, do_sample=False).new_tokens)
        steps.append(method.report(model)["steps"])
    assert texts[0] == texts[1] == texts[2]
    assert 5 < steps[1] < steps[2] == steps[3]
    assert json.dumps(method.report(model))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_found_set_is_saved_and_used_again(tmp_path: Path) -> None:
    model, path = llama(layers=6), tmp_path / "found.json"
    with pytest.raises(ValueError, match="nothing to save"):
        METHOD.save(model, path)
    skipstone.generate(model, prompt(9), METHOD, max_new_tokens=40, do_sample=False)
    METHOD.save(model, path)
    profile = load_profile(path, model)
    assert {"attention": list(profile.attention), "mlp": list(profile.mlp)} == METHOD.report(model)["skipped"]
    assert "matchness" in profile.about


def test_sessions_and_the_guard_share_the_search() -> None:
    runner = ModelRunner(llama(layers=6))
    one, wide = (METHOD.create_drafter(runner, rows, 20).optimisation for rows in (1, 3))  # type: ignore[attr-defined]
    assert one is wide is replace(METHOD, guard=True).optimisation(runner)


def test_a_search_runs_on_a_real_model() -> None:
    model, method = llama(layers=6), Swift(0.5, 4, None, context_window=6)
    out: Any = skipstone.generate(model, prompt(9), method, max_new_tokens=200, do_sample=False)
    found = method.report(model)
    assert found["evaluations"] > 20
    assert out.stats.seconds_search > 0
    assert found["history"][0]["evaluation"] == 0
    assert len(found["history"]) > 1
    assert found["history"][-1]["attention"] == found["skipped"]["attention"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "opt", "mixtral"])
def test_searches_change_no_text(family: str) -> None:
    """Ragged rows, greedy and sampled, with the default settings and with the guard."""
    model, asked = families.cached(family), families.padded([prompt(length, length, vocab=50) for length in (9, 4, 13)])
    for sampled in ({"do_sample": False}, {"do_sample": True, "temperature": 0.7, "seed": 3}):
        wish: dict[str, Any] = {"max_new_tokens": 60, **sampled}
        plain = skipstone.generate(model, asked, Autoregressive(), **wish).new_tokens
        for guard in (True, False):
            method = Swift(0.5, 4, 0.1, context_window=6, guard=guard)
            for _ in range(2):
                assert skipstone.generate(model, asked, method, **wish).new_tokens == plain
            assert guard or method.report(model)["evaluations"] > 0


def test_a_profile_is_for_one_model(tmp_path: Path) -> None:
    model, other, path = llama(layers=6), llama(layers=6, seed=1), tmp_path / "profile.json"
    mark = fingerprint(model)
    assert fingerprint(copy.deepcopy(model)) == fingerprint(copy.deepcopy(model).to(torch.bfloat16)) == mark
    assert mark != fingerprint(other)
    save_profile(path, model, {}, (1, 2), (2,), "mine")
    for method in (SelfSpeculative(profile=str(path)), Swift(profile=str(path))):
        assert assert_as_plain(model, prompt(9), method, max_new_tokens=30, do_sample=False).stats.accepted > 0
        with pytest.raises(ValueError, match=r"the profile of another model \(mine; this one is"):
            skipstone.generate(other, prompt(9), method, max_new_tokens=4)
    assert Swift(profile=str(path)).report(model)["skipped"] == {"attention": [1, 2], "mlp": [2]}
    for text, words in (
        ("{", "is damaged"),
        ('{"model": "x", "layers": []}', "says nothing of a layer set: unknown setting 'layers'"),
        ('{"model": "x", "version": 9}', "a layer set of version 9"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=words):
            load_profile(path, model)
    with pytest.raises(FileNotFoundError):
        load_profile(tmp_path / "none.json", model)
