"""The output law of the composed loop, exactly: every outcome of every draw is explored with its weight (DESIGN, section 6)."""

from dataclasses import replace
from typing import Any

import pytest
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from skipstone import Autoregressive, LayerSkip, Sampling, Swift
from skipstone.engines.native import library
from skipstone.methods.drafting.chain_stop_rule import ConfidenceRule
from tests.helpers import planted
from tests.helpers.enumeration import EXACT, PROMPT, VOCAB, Pushing, Tabled, distance, exact_law, loop_law, proves
from tests.helpers.machine import llama
from tests.helpers.pairwise import slow_except
from tests.helpers.trees import Trees


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(vocab=VOCAB, hidden=8, layers=2, head=2.0, seed=2).double()


SKIP = LayerSkip(exit_layer=1, num_speculative_tokens=2)
WARPED: dict[str, Any] = {"warpers": [TemperatureLogitsWarper(0.75), TopKLogitsWarper(2)], "temperature": 0.75, "top_k": 2}
OTHER: list[Any] = [TemperatureLogitsWarper(2.0), TopPLogitsWarper(0.75), MinPLogitsWarper(0.25)]
PROCESSED: dict[str, Any] = {"processors": [RepetitionPenaltyLogitsProcessor(1.7), Pushing()]}
NUCLEUS: dict[str, Any] = {"warpers": [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.75)], "temperature": 1.5, "top_p": 0.75}
CHAIN, TREE = Trees(nodes=2, branching=0.0, seed=5), Trees(nodes=5, branching=0.7, seed=5)
LAWS: dict[str, tuple[Any, dict[str, Any], set[tuple[int, int]]]] = {
    "plain": (Autoregressive(), {}, {(0, 0)}),
    "short": (SKIP, {"new": 3}, {(1, 0), (1, 1)}),
    "processors, short": (SKIP, {**PROCESSED, "new": 3}, {(1, 0), (1, 1)}),
    "warpers": (SKIP, WARPED, {(2, 0), (2, 2)}),
    "chain": (CHAIN, {}, {(2, 2), (2, 0)}),
    "tree, processors": (TREE, PROCESSED, {(3, 1), (3, 0)}),
    "tree, warpers": (TREE, NUCLEUS, {(3, 1), (3, 0)}),
    "standard": (SKIP, {}, {(2, 0), (2, 1), (2, 2), (1, 0), (1, 1)}),
    "processors": (SKIP, PROCESSED, {(2, 0), (2, 2)}),
    "no reuse": (replace(SKIP, reuse_cache=False), {}, {(2, 0), (2, 1), (2, 2)}),
    "fixed confidence": (replace(SKIP, confidence_threshold=0.6), {}, {(1, 0), (2, 2)}),
    "other warpers": (SKIP, {"warpers": OTHER, "temperature": 2.0, "top_p": 0.75, "min_p": 0.25}, {(2, 0)}),
    "own warpers": (SKIP, {"own": [TemperatureLogitsWarper(1.5), TypicalLogitsWarper(0.8)]}, {(2, 0)}),
    "chain, processors": (CHAIN, PROCESSED, {(2, 2), (2, 0)}),
    "chain, warpers": (CHAIN, NUCLEUS, {(2, 2), (2, 0)}),
    "tree": (TREE, {}, {(3, 1), (3, 0)}),
    "five tokens, adaptive": (LayerSkip(1, 3, "adaptive"), {"new": 5}, {(3, 0), (3, 3)}),
}
"""Method, settings, and pairs of drafted and accepted tokens that must occur."""


@pytest.mark.parametrize("name", slow_except([*LAWS][:7], LAWS, full=[*LAWS][:-1]))
def test_the_loop_has_the_exact_law(name: str, model: Any) -> None:
    """Processors see the committed text and the path of the draft, on both sides of the acceptance test."""
    method, settings, steps = LAWS[name]
    assert steps <= set(proves(model, method, **settings).steps)


@pytest.mark.slow
def test_an_adaptive_confidence_threshold_keeps_the_law(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft lengths that depend on earlier verdicts. Large steps move the threshold past the confidences within one text."""
    monkeypatch.setattr(ConfidenceRule, "STEP", 4.0)
    monkeypatch.setattr(ConfidenceRule, "TARGET_RATE", 0.45)
    watched: list[Any] = []
    update = ConfidenceRule.update

    def watching(self: ConfidenceRule, verdicts: Any) -> None:
        update(self, verdicts)
        watched.append(self.thresholds[0])

    monkeypatch.setattr(ConfidenceRule, "update", watching)
    seen = proves(model, replace(SKIP, confidence_threshold="adaptive"))
    assert min(watched) < 0.5
    assert max(watched) > 0.7
    assert {(2, 0), (1, 0), (1, 1)} <= set(seen.steps)


NATIVE = ["warpers", "plain", "standard", "fixed confidence", "tree, processors"]


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
@pytest.mark.parametrize("name", slow_except(NATIVE[:1], NATIVE))
def test_the_law_is_exact_on_the_native_engine(name: str) -> None:
    """To 1e-9, although it computes in float32: what it computes for a token has the same bits in every pass."""
    method, settings, steps = LAWS[name]
    seen = proves(llama(vocab=VOCAB, hidden=8, layers=2, head=2.0, seed=2), method, native=True, **settings)
    assert steps <= set(seen.steps)


SIBLINGS = Swift(0.5, 2, None, search="uniform", candidate_counts=(2, 2, 2, 2), rejection_sample_method="standard")
TREES: list[Any] = [
    ({"new": 3}, {(2, 0), (2, 1)}),
    ({**WARPED, "new": 4}, {(4, 1), (4, 2)}),
    pytest.param({**PROCESSED, "new": 3}, {(2, 0), (2, 1)}, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("settings", "steps"), TREES)
def test_siblings_drawn_without_replacement_keep_the_law(settings: dict[str, Any], steps: set[tuple[int, int]]) -> None:
    assert steps <= set(proves(deep_model(), SIBLINGS, **settings).steps)


def deep_model() -> Any:
    return llama(vocab=VOCAB, hidden=8, layers=4, head=2.0, seed=2).double()


SUPPORTS = [
    ((0.0, 0.5, 0.5), (0.5, 0.5, 0.0), None),
    ((1.0, 0.0, 0.0), (0.25, 0.25, 0.5), None),
    ((0.25, 0.25, 0.5), (0.0, 0.0, 1.0), None),
    ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), None),
    ((0.2, 0.3, 0.5), (0.2, 0.3, 0.5), None),
    ((0.8, 0.2), (0.8, 0.2), 0.75),
]


@pytest.mark.parametrize(("p", "q", "threshold"), SUPPORTS)
def test_the_law_is_exact_where_supports_differ(p: tuple[float, ...], q: tuple[float, ...], threshold: float | None) -> None:
    fake: Any = Tabled(p, q)
    found = loop_law(replace(SKIP, confidence_threshold=threshold), fake, PROMPT, 4, Sampling(temperature=1.0))
    assert distance(found, exact_law(lambda _: p, 4, len(p))) < EXACT


COOL: dict[str, Any] = {"warpers": [TemperatureLogitsWarper(0.5)], "temperature": 0.5}


def short(method: Any = SKIP, new: int = 3, **settings: Any) -> None:
    proves(llama(vocab=VOCAB, hidden=8, layers=2, head=2.0, seed=2).double(), method, new=new, **settings)


@planted.found_by(
    (planted.recovered_from_p, short),
    (planted.bonus_from_raw_logits, lambda: short(**COOL)),
    (planted.drawn_token_dropped, short),
    (planted.q_before_warpers, lambda: short(**COOL)),
    (planted.processors_blind_to_the_draft, lambda: short(processors=[Pushing()])),
    (planted.processors_blind_to_the_draft, lambda: short(TREE, 4, processors=[Pushing()])),
    (planted.noise_used_twice, lambda: short(new=4)),
    (planted.siblings_not_renormalised, lambda: proves(deep_model(), SIBLINGS, new=3)),
    every=3,
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
