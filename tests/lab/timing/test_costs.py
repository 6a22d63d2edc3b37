"""Costs are measured of any engine, make sense, and are kept; what is kept badly is measured anew."""

import json
from pathlib import Path
from typing import Any

import pytest

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.native import library
from skipstone.lab.timing import machine, measure_costs
from skipstone.lab.timing.cost_tables import BatchCosts
from skipstone.lab.timing.measure_costs import CostTimer, EntryTimes, costs_of, measure
from skipstone.methods.drafting.draft_model import DraftModel
from skipstone.models.fingerprint import fingerprint
from tests.helpers import families

needs_native = pytest.mark.skipif(library.missing() is not None, reason="no native engine")


@pytest.fixture(autouse=True)
def _cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "cache"))


def runner(engine: str = "auto", **changes: Any) -> ModelRunner:
    return ModelRunner(families.build("llama", **{"max_position_embeddings": 300, **changes}), engine)


@pytest.mark.parametrize(("engine", "batch"), [("eager", 1), pytest.param("native", 3, marks=needs_native)])
def test_what_is_measured_is_positive_and_ordered(engine: str, batch: int) -> None:
    found = measure(runner(engine), batch, 0.0)
    assert (found.batch, found.depth) == (batch, 4)
    assert found.exits.places == (1, 2, 3, 4)
    assert found.scoring.places[0] == 1
    assert found.scoring.places[-1] == 64 // batch
    for curve in (found.scoring, found.layers, found.exits):
        assert all(value > 0 for value in curve.values)
        assert all(a <= b for a, b in zip(curve.values, curve.values[1:], strict=False))
    assert found.plain >= found.fixed
    assert found.layers(1) <= found.scoring(1)


def test_nothing_that_is_timed_is_committed() -> None:
    bench = CostTimer(runner(), 2)
    for timed in bench.entries(False).values():
        assert timed() > 0
        assert timed() > 0
    for session in (bench.lookups, bench.exits, bench.chains, bench.ranked_chains):
        session.store.length = [bench.context] * 2
        assert session.view.last == [0, 0]


def test_an_exit_is_timed_at_its_own_layer() -> None:
    raw, ran = families.build("llama", max_position_embeddings=300), list[int]()
    for number, layer in enumerate(raw.model.layers):
        layer.register_forward_hook(lambda *_, number=number: ran.append(number))
    timed = CostTimer(ModelRunner(raw, "eager"), 1).entries(False)
    for exit_layer in (1, 2, 3):
        ran.clear()
        timed[f"exit {exit_layer}", 1]()
        assert ran == [0, 1, 2, 3, *range(exit_layer)], "after a whole pass"


def test_a_draft_step_is_what_a_longer_chain_takes_more() -> None:
    times = EntryTimes({("a", 1): [3.5, 3.0], ("a", 3): [11.0, 12.0], ("b", 1): [4.0], ("b", 3): [4.0]})
    assert times.cost("a", 1) == 3.0
    assert times.step("a") == pytest.approx((11 - 3) / 2)
    assert times.step("b") == pytest.approx(4 / 3 / 2), "a stall in the short one"
    assert times.by_number("a") == {1: 3.0, 3: 11.0}
    assert times.spread() == pytest.approx((0 + 0.5 / 11) / 2), "the median of 1/12, 1/22, 0 and 0"


def test_on_a_busy_machine_means_count() -> None:
    times = EntryTimes({("a", 1): [1.0, 1.0, 4.0], ("a", 3): [4.0, 9.0, 11.0], ("b", 1): [1.0, 2.0, 3.0]})
    assert times.spread() == pytest.approx(1.0), "the median of 0, 5/4 and 1"
    assert times.busy
    assert times.by_number("a") == {1: 2.0, 3: 8.0}
    assert not EntryTimes({("a", 1): [1.0, 1.1]}, 1.8).busy
    assert EntryTimes({("a", 1): [1.0, 1.1]}, 0.4).busy, "the process had no core most of the time"


def test_costs_are_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, calls = runner(), []
    real = measure_costs.measure
    monkeypatch.setattr(measure_costs, "measure", lambda one, batch: calls.append(batch) or real(one, batch, 0.0))
    first = costs_of(model, (1,))
    assert first.fresh
    assert first.path is not None
    assert first.path.is_relative_to(tmp_path / "cache")
    again = costs_of(model.model, (1,))
    assert (again.costs, again.fresh, calls) == (first.costs, False, [1])
    both = costs_of(model, (1, 2))
    assert (both.costs.at(1), calls) == (first.costs.at(1), [1, 2])
    assert [table.batch for table in costs_of(model, (2,)).costs.batches] == [1, 2], "nothing is lost"
    monkeypatch.setattr(measure_costs, "was_busy", lambda _: True)
    again = costs_of(model, (1,), again=True)
    assert (again.fresh, again.costs.at(1).busy) == (True, True)
    assert calls == [1, 2, 1]


def _falling(held: Any) -> str:
    held["costs"]["batches"][0]["scoring"]["values"] = [2.0, 1.0]
    return json.dumps(held)


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda held: json.dumps(held)[:200],
        lambda held: json.dumps({**held, "version": 0}),
        lambda held: json.dumps({**held, "key": {**held["key"], "cpu": "another"}}),
        _falling,
    ],
)
def test_a_file_that_is_damaged_or_stale_is_measured_anew(spoilt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    real = measure_costs.measure
    monkeypatch.setattr(measure_costs, "measure", lambda one, batch: real(one, batch, 0.0))
    model = runner()
    path = costs_of(model, (1,)).path
    assert path is not None
    path.write_text(spoilt(json.loads(path.read_text())))
    assert costs_of(model, (1,)).fresh
    assert not costs_of(model, (1,)).fresh


def test_a_cache_that_cannot_be_written_costs_the_file_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SKIPSTONE_CACHE", str(tmp_path / "file"))
    with pytest.warns(RuntimeWarning, match="SKIPSTONE_CACHE"):
        found = costs_of(runner(), (1,))
    assert found.path is None
    assert isinstance(found.costs.at(1), BatchCosts)


def test_other_facts_are_other_files() -> None:
    keys = [measure_costs.key_of(runner(engine, seed=seed)) for engine, seed in (("eager", 0), ("eager", 1))]
    assert keys[0]["model"] != keys[1]["model"]
    assert {**keys[0], "model": ""} == {**keys[1], "model": ""}
    if library.missing() is None:
        native = measure_costs.key_of(runner("native"))
        assert native["library"]
        assert keys[0]["library"] is None
        assert native != keys[0]


def test_a_draft_models_steps_are_measured_beside_the_rest() -> None:
    model = runner()
    small = DraftModel(families.build("llama", layers=2, seed=3, max_position_embeddings=300), 97)
    first = costs_of(model, (1,))
    found = costs_of(model, (1,), [small])
    name = fingerprint(small.model)
    assert list(found.costs.at(1).draft_models) == [name]
    assert found.costs.at(1).draft_models[name] > 0
    assert found.costs.at(1).scoring == first.costs.at(1).scoring
    assert not costs_of(model, (1,), [small]).fresh


def test_a_model_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="too few to measure"):
        measure(runner(max_position_embeddings=64), 1)
    with pytest.raises(ValueError, match="at least 2 layers"):
        measure(runner(layers=1), 1)


@pytest.mark.usefixtures("eager_engine")
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


@needs_native
def test_the_ceiling_of_a_quantised_model_counts_its_codes_and_scales() -> None:
    model, _ = skipstone.load(engine="native", quantize="int8")
    matrices = sum(one.numel() for one in model.parameters() if one.dim() == 2)
    found = machine.ceiling(model, mean_length=0.0, megabytes=4)
    assert found["weight_bytes_per_token"] == matrices * 34 // 32
