"""Costs and a run's counts by hand, and the speed-up that they predict."""

from dataclasses import asdict, replace
from typing import Any

import pytest

from skipstone import METHODS, LayerSkip, PromptLookup, SelfSpeculative, Swift
from skipstone.decoding.stats import Stats
from skipstone.engines.model_runner import ModelRunner
from skipstone.lab.bench import speedup_predictions
from skipstone.lab.bench.report.aggregate import groups
from skipstone.lab.timing.cost_tables import BatchCosts, CostCurve
from tests.helpers import families
from tests.helpers.results import lines

TABLE = BatchCosts(
    batch=1,
    context=100,
    plain=0.010,
    fixed=0.001,
    chain=0.001,
    scoring=CostCurve((1, 5), (0.009, 0.013)),
    layers=CostCurve((1, 5), (0.008, 0.010)),
    exits=CostCurve((1, 4), (0.001, 0.007)),
    attention=0.001,
    mlp=0.001,
    layer=0.0,
    ranked=0.002,
    context_slope=CostCurve((1, 5), (0.0, 0.0)),
    draft_models={"abc": 0.002},
)
TOTAL = Stats(tokens=30, steps=12, drafting=10, turns=12, drafted=40, draft_steps=40, accepted=18, verified_nodes=40)


def predicted(
    said: dict[str, Any], known: dict[str, Any] | None = None, grown: dict[str, Any] | None = None, total: Stats = TOTAL
) -> float | None:
    return speedup_predictions.speedup(asdict(TABLE), said, total, 100, known, grown)


def test_adadecode_costs_its_passes_and_tests() -> None:
    """10 steps with 14 early tokens: at layer 2 of 4 in 20 passes of one token; to the top with 3 tokens, or one. A test is the
    LM head, what a draft step of one layer takes besides that layer."""
    grown = {
        "steps": 10,
        "tests": 20,
        "stops": 5,
        "exits": {"2": {"accepted": 12}, "3": {"accepted": 2}},
        "passes": {"0, 2, 1": 20, "2, 4, 3": 8, "0, 4, 1": 2},
    }
    table = replace(TABLE, exits=CostCurve((1, 4), (0.0025, 0.009)))
    layers = 20 * 0.5 * 0.008 + 8 * 0.5 * 0.009 + 2 * 0.008
    scored = (8 * 3 + 2) / 10  # tokens a step
    scoring, layers_scored = 0.009 + (scored - 1) * 0.001, 0.008 + (scored - 1) * 0.0005
    seconds = layers + 20 * (0.0025 - 0.25 * 0.008) + 10 * (scoring - layers_scored + 0.001)
    found = speedup_predictions.speedup(asdict(table), {"passes": True}, TOTAL, 100, None, grown)
    assert found == pytest.approx(24 * 0.010 / seconds)
    assert predicted({"passes": True}) is None
    assert predicted({"passes": True}, None, grown | {"steps": 0}) is None


def test_every_kind_of_drafter_by_hand() -> None:
    def speedup(drafting: float, scoring: float = 0.013, chain: float = 0.001) -> Any:
        step = 10 / 12 * (4 * drafting + chain + scoring + 0.001) + 2 / 12 * 0.010
        return pytest.approx(2.5 * 0.010 / step)

    assert predicted({"exit_layer": 2}) == speedup(0.003, 0.013 - 0.5 * 0.002)
    assert predicted({"attention": 2, "mlp": 1, "both": 1}) == speedup(0.004)
    assert predicted({"looked_up": True}) == speedup(0.0, chain=0.0)
    assert predicted({"draft_model": "abc"}) == speedup(0.002)
    learnt = {"skipped": {"attention": [1], "mlp": [1, 2]}}
    assert predicted({"learnt": True, "ranked": True}, learnt) == speedup(0.004 + 0.002)
    assert predicted({"learnt": True, "ranked": False}, learnt) == speedup(0.004)
    assert predicted({"draft_model": "xyz"}) is predicted({"learnt": True, "ranked": True}) is None
    assert predicted({"exit_layer": 2}, total=Stats(tokens=5, steps=5)) is None


def test_methods_for_which_the_formula_holds() -> None:
    runner = ModelRunner(families.cached("llama"))
    assert speedup_predictions.described(LayerSkip(exit_layer=2), runner) == {"exit_layer": 2}
    assert speedup_predictions.described(LayerSkip(exit_layer=2, reuse_cache=False), runner) is None
    skipping = SelfSpeculative(skip_attention=(1, 2), skip_mlp=(2,))
    assert speedup_predictions.described(skipping, runner) == {"attention": 2, "mlp": 1, "both": 1}
    assert speedup_predictions.described(Swift(dynamic_verification=False), runner) == {"learnt": True, "ranked": False}
    assert speedup_predictions.described(PromptLookup(), runner) == {"looked_up": True}
    assert speedup_predictions.described(METHODS["adadecode"](), runner) == {"passes": True}
    assert speedup_predictions.described(PromptLookup(guard=True), runner) is None
    for name in ("autoregressive", "early_exit", "adasd"):
        assert speedup_predictions.described(METHODS[name](), runner) is None


def test_the_report_has_it_beside_what_was_measured() -> None:
    run = [{"kind": "run", "plan": {"seed": 0}}, *lines()]
    run[1] |= {"costs": asdict(TABLE), "drafters": {"layerskip": [None, {"exit_layer": 2}]}}
    run[2]["candidate"] = 1
    for line in run[3:]:
        line["rows"]["layerskip"]["stats"] |= {"drafting": 50, "verified_nodes": 200}
    (group,) = groups(run)
    own, plain = group.over_all("layerskip"), group.over_all("autoregressive")
    step = 2 * 0.003 + 0.001 + 0.013 - 0.5 * 0.002 + 0.001  # two draft steps a step, five tokens scored
    assert own["costed_speedup"] == pytest.approx(2 * 0.010 / step)
    assert "costed_speedup" not in plain
    (group,) = groups(run)
    group.temperature = 1.0
    assert group.over_all("layerskip")["costed_speedup"] is None, "of sampling nothing is known"
