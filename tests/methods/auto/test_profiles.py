"""What `auto` has learnt, in files: kept for other processes and other sets of candidates."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from skipstone import LayerSkip, PromptLookup, Recycle
from skipstone.decoding import method_states
from skipstone.decoding.request import Request
from skipstone.engines.choose_engine import copies_of
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.methods.auto import auto, saved_profile
from skipstone.methods.auto.auto import Auto, AutoDrafter
from skipstone.methods.auto.learned import MIN_SAVED_STEPS, Learned
from skipstone.policy.regret_budget import CREDIT, CREDIT_SECONDS, CREDIT_STEPS, REQUEST_CREDIT
from tests.helpers import families
from tests.helpers.machine import decode, llama, prompt


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path))
    return tmp_path / "auto"


def decoded(method: Auto, runner: ModelRunner, tokens: int = 3 * MIN_SAVED_STEPS) -> Any:
    """What was learnt."""
    decode(method, runner, [Request(prompt(9), tokens)])
    return method_states.known_state(method, None, runner.model)


def named(seed: int = 0) -> ModelRunner:
    raw = llama(head=1.0, seed=seed)
    raw.config.name_or_path = "some/model"
    return ModelRunner(raw)


def test_a_profile_serves_other_candidates_and_forgets_none(cache: Path) -> None:
    first, second = (Auto((PromptLookup(), Recycle(), LayerSkip(exit))) for exit in (1, 2))
    learned = decoded(first, named())
    first.save_learned(named())
    assert not cache.exists(), "another model has learnt nothing"
    runner = named()
    learned = decoded(first, runner)
    first.save_learned(runner)
    (path,) = cache.iterdir()
    written = path.read_text()
    first.save_learned(runner)
    assert path.read_text() == written, "nothing new was learnt"
    other = named()
    began = AutoDrafter(second, other, 1, 64).learned
    assert began.policy.position == learned.policy.position > 0
    assert not began.policy.is_timed, "plain steps are timed again"
    assert set(began.policy.drafters) == {"recycle", "layerskip, exit 2"}
    decoded(second, other)
    second.save_learned(other)
    state = json.loads(path.read_text())
    assert set(state["drafters"]) == {"layerskip, exit 1", "layerskip, exit 2"}
    again = AutoDrafter(first, named(), 1, 64).learned
    assert again.policy.drafters["layerskip, exit 1"].rate == learned.policy.drafters["layerskip, exit 1"].rate
    assert again.policy.costs.drafting["layerskip, exit 1"] == learned.policy.costs.drafting["layerskip, exit 1"]


def test_a_model_is_known_by_its_name_and_norms_without_reading_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, other = named(), named()
    profile = saved_profile.SavedPolicy(AutoDrafter(Auto(), runner, 1, 64).learned.policy, {}, {"note": 1}, {"a": 1})
    saved_profile.save_profile(runner, profile)
    other.model.model.norm.weight.data += 1
    monkeypatch.setattr(ModelRunner, "fingerprint", None)
    assert saved_profile.load_profile(named()) == profile
    assert saved_profile.load_profile(other) is None


def test_a_writer_keeps_what_others_have_written_meanwhile_and_a_failure_is_logged(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner, methods = named(), [Auto((LayerSkip(exit),)) for exit in (1, 2)]
    for method in methods:
        decoded(method, runner)
    with monkeypatch.context() as patch:
        patch.setattr(saved_profile, "read", None)
        method_states.save_learned(runner)
    assert [one.levelname for one in caplog.records] == ["WARNING"] * 2
    for method in methods:
        decoded(method, runner)
    method_states.save_learned(runner)
    (path,) = cache.iterdir()
    assert set(json.loads(path.read_text())["drafters"]) == {"layerskip, exit 1", "layerskip, exit 2"}


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
def test_a_mapped_model_is_known_by_its_files_without_reading_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def runner() -> ModelRunner:
        return ModelRunner(families.mapped_from(tmp_path / "model"))

    raw = families.build("llama")
    raw.save_pretrained(tmp_path / "model")
    first = runner()
    decoded(Auto((LayerSkip(1),)), first)
    with monkeypatch.context() as patch:
        patch.setattr(ModelRunner, "fingerprint", None)
        method_states.save_learned(first)
        assert saved_profile.load_profile(runner()) is not None
    (path,) = (tmp_path / "auto").iterdir()
    assert saved_profile.load_profile(runner(), str(path)) is not None
    with torch.no_grad():
        raw.model.layers[0].mlp.up_proj.weight += 0.1  # as a merged adapter
    raw.save_pretrained(tmp_path / "model")
    assert saved_profile.load_profile(runner()) is None
    with pytest.raises(ValueError, match="its model is"):
        saved_profile.load_profile(runner(), str(path))


@pytest.mark.parametrize("damage", ["no time of scoring", "an unknown drafter"])
def test_a_profile_that_is_not_whole_is_not_used(damage: str, cache: Path) -> None:
    runner, method = named(), Auto((LayerSkip(1),))
    decoded(method, runner)
    method.save_learned(runner)
    (path,) = cache.iterdir()
    values = json.loads(path.read_text())
    assert saved_profile.load_profile(named()) is not None
    if damage == "no time of scoring":
        values["state"]["costs"]["scoring"] = {}
    else:
        values["drafters"]["another"] = ""
    path.write_text(json.dumps(values))
    assert saved_profile.load_profile(named()) is None
    with pytest.raises(ValueError, match="damaged"):
        saved_profile.load_profile(named(), str(path))


def test_a_first_request_may_lose_its_credit_in_seconds_and_its_set_up_is_part_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether or not a profile was saved."""
    monkeypatch.setattr(AutoDrafter, "setup_seconds", lambda *_: 0.001)
    runner, method = named(), Auto((PromptLookup(),))
    for plain, expects_gain in product((0.0001, 0.05), (False, True)):
        learned = AutoDrafter(method, runner, 1, 64).learned
        learned.is_limited, learned.expects_gain = False, expects_gain
        learned.policy.budget.overall = CREDIT
        learned.policy.costs.plain.value = plain
        learned.charge_setup(0.001)
        credit = min(expects_gain * CREDIT_STEPS + CREDIT_SECONDS / plain, REQUEST_CREDIT)
        assert learned.policy.budget.overall == pytest.approx(credit - 0.001 / plain)
    decoded(method, runner)
    method.save_learned(runner)
    drafter, charged = AutoDrafter(method, runner, 1, 64), list[float]()
    drafter.learned.waiting["int4"] = 0.0
    with monkeypatch.context() as patch:
        patch.setattr(Learned, "charge_setup", lambda _, seconds: charged.append(seconds))
        drafter._set_up("int4")
    assert charged == [0.002], "with that of the first candidates"
    again = AutoDrafter(method, named(), 1, 64)
    assert again.learned.policy.position > 0
    assert not again.learned.is_limited


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
def test_it_says_what_copies_take_and_how_to_make_one_that_would_pay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    families.build("llama").save_pretrained(tmp_path)
    runner, later = (ModelRunner(families.mapped_from(tmp_path)) for _ in range(2))
    unmapped, method = named(), Auto()
    for one in (runner, later, unmapped):
        one.model.config.name_or_path = "some/model"
        decoded(method, one, 8)
    assert method.notes(runner) == [], "such short steps gain little"
    monkeypatch.setattr(auto, "PAYING_STEP_SECONDS", 0.0)
    assert "`skipstone tune some/model` makes it" in method.notes(runner)[0]
    assert Auto(max_extra_memory_bytes=10).notes(runner) == []
    assert "are allowed" in str(Auto(max_extra_memory_bytes=10).make_copy(runner))
    assert method.make_copy(runner) is None
    nbytes = sum(copies_of(runner.model).values())
    assert method.notes(runner) == [f"copies of the weights for drafting, extra memory: int4 {nbytes / 1e6:.0f} MB"]
    assert method.notes(later) == [], "the copy is on the disk, and the text was too short for it"
    assert method.notes(unmapped) == [], "its copies are not written to the disk"
    assert method.make_copy(unmapped) == "the disk's cache does not take it"
