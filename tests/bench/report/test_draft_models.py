"""What a report says of draft models, and of what lossy methods cost."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from skipstone import AdaSD, Autoregressive
from skipstone.bench.lineup import entrants
from skipstone.bench.peers import DraftAlone
from skipstone.bench.perplexity import log_likelihood
from skipstone.bench.report import report
from skipstone.bench.report.by_method import by_draft_model, likelihood, means
from skipstone.timing.measure import Skipstone, growth, measure, options_for
from tests.helpers import families
from tests.helpers.machine import llama, near, prompt
from tests.helpers.results import lines, written

MEANS = {
    "distance_accepted": {"sum": 3.0, "count": 20},
    "distance_rejected": {"sum": 4.9, "count": 10},
    "distance_threshold": {"sum": 0.0, "count": 0},
}


def adasd() -> list[dict[str, Any]]:
    """The run of tests/helpers/results.py with AdaSD in the place of LayerSkip: 303 tokens, 15 of them overruled."""
    found = copy.deepcopy(lines())
    found[0]["methods"]["adasd"] = {
        **found[0]["methods"].pop("layerskip"),
        "method": "adasd",
        "settings": {},
        "lossless": False,
    }
    found = [line for line in found if line["kind"] != "tuned"]
    for line in (line for line in found if "rows" in line):
        own = line["rows"]["adasd"] = {**line["rows"].pop("layerskip"), "grown": {"means": MEANS}, "log_likelihood": -202.0}
        own["stats"] = {**own["stats"], "overruled": 5}
        for name in ("autoregressive", "hf-generate"):
            line["rows"][name]["log_likelihood"] = -101.0
    return found


def test_what_drafts_cost_stands_beside_the_speed(tmp_path: Path) -> None:
    _, (group,) = report.load([written(tmp_path / "a.jsonl", adasd())])
    assert means(group, "adasd") == {"distance_accepted": pytest.approx(0.15), "distance_rejected": pytest.approx(0.49)}
    assert likelihood(group, "adasd") == pytest.approx(-2.0)
    table = by_draft_model(group)
    shown = {row[0]: dict(zip(table.columns, row, strict=True)) for row in table.rows}
    assert set(shown) == {"autoregressive", "hf-generate", "adasd (lossy)"}
    own = shown["adasd (lossy)"]
    assert (own["JSD accepted"], own["JSD rejected"], own["threshold"]) == ("0.150", "0.490", "-")
    assert (own["#cand"], own["#match"], own["AccRate"]) == ("2.00", "1.00", "0.500"), "100 and 50 in 50 steps"
    assert float(own["tokens/s"]) > float(shown["autoregressive"]["tokens/s"]) > 0
    assert (own["overruled"], own["log-likelihood"], own["score"]) == ("5.0 %", "-2.000", "exact_match 0.333")
    assert shown["autoregressive"]["log-likelihood"] == "-1.000"
    assert "drafts, and what keeping them costs" in report.report([tmp_path / "a.jsonl"], "md")


def test_a_run_of_lossless_methods_has_no_such_table(tmp_path: Path) -> None:
    _, (group,) = report.load([written(tmp_path / "a.jsonl", lines())])
    assert by_draft_model(group).rows == []
    assert likelihood(group, "layerskip") is None


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt_projected"])
def test_the_likelihood_of_a_text_is_transformers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("skipstone.bench.perplexity.CHUNK", 3)
    model, asked, answer = families.cached(family), prompt(6, vocab=50), prompt(8, 1, vocab=50).tolist()
    said = model(torch.cat([asked, torch.tensor(answer)])[None]).logits[0, 5:-1].double().log_softmax(-1)
    expected = said.gather(1, torch.tensor(answer)[:, None]).sum()
    assert log_likelihood(model, asked, answer) == pytest.approx(float(expected), rel=1e-5)
    assert log_likelihood(model, asked, []) == 0


def test_sums_grow_as_counts_do() -> None:
    before = {"means": {"a": {"sum": 1.5, "count": 2}}, "threshold": 0.3}
    after = {"means": {"a": {"sum": 4.0, "count": 7}, "b": {"sum": 1.0, "count": 1}}, "threshold": 0.4}
    assert growth(before, after) == {"means": {"a": {"sum": 2.5, "count": 5}, "b": {"sum": 1.0, "count": 1}}}


def test_a_draft_model_alone_says_what_it_says_alone() -> None:
    model = llama()
    helper = near(model, 0.3)
    plain, options = Skipstone(Autoregressive()), options_for(30)
    found = measure(model, DraftAlone(helper), prompt(9), options, 0)  # type: ignore[arg-type]
    assert found.tokens == measure(helper, plain, prompt(9), options, 0).tokens
    assert found.tokens != measure(model, plain, prompt(9), options, 0).tokens
    wishes = [{"method": "autoregressive"}, {"method": "draft-alone", "draft_model": helper}]
    entered, _ = entrants(wishes, model, False)
    assert [one.lossless for one in entered] == [True, False]


def test_what_a_call_adds_to_adasds_means_is_its_own() -> None:
    model = llama()
    method = AdaSD(near(model, 0.12))
    first, second = (measure(model, Skipstone(method), prompt(n, n), options_for(40), 0) for n in (9, 5))
    assert first.grown is not None
    assert second.grown is not None
    both = method.report(model)["means"]["distance_accepted"]
    parts = [one.grown["means"]["distance_accepted"] for one in (first, second)]
    assert sum(part["count"] for part in parts) == both["count"] > 10
    assert sum(part["sum"] for part in parts) == pytest.approx(both["sum"])
