"""The output law of the composed loop, exactly: every outcome of every draw is explored with its weight (DESIGN section 6 b).

Prefill, drafting, scoring, verification, stopping and commit are the real code on a real Llama (3 tokens, float64). The
expected law comes from transformers' own forward and processors over every prefix. Four new tokens: one from the prefill, then
steps that have room for two drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
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

from skipstone import Autoregressive, Draft, LayerSkip, Sampling
from skipstone.engines.engine import SurvivalThresholds
from skipstone.engines.native import library
from skipstone.methods.drafting.confidence import ConfidenceRule
from skipstone.methods.layerskip import LayerSkipDrafter
from tests.helpers import planted
from tests.helpers.enumeration import EXACT, PROMPT, VOCAB, Law, Pushing, Tabled, distance, exact_law, loop_law, proves
from tests.helpers.machine import llama
from tests.helpers.pairwise import slow_except
from tests.helpers.trees import Trees


@pytest.fixture(scope="module")
def model() -> Any:
    return llama(vocab=VOCAB, hidden=8, layers=2, head=2.0, seed=2).double()


def test_plain_decoding_has_the_exact_law(model: Any) -> None:
    seen = proves(model, Autoregressive())
    assert seen.lengths == {0}


@pytest.mark.parametrize(
    ("new", "steps"), [(3, {(1, 0), (1, 1)}), pytest.param(4, {(2, 0), (2, 1), (2, 2), (1, 0), (1, 1)}, marks=pytest.mark.slow)]
)
def test_layerskip_standard_has_the_exact_law(model: Any, new: int, steps: set[tuple[int, int]]) -> None:
    """steps: drafted and accepted tokens that must have been met."""
    seen = proves(model, LayerSkip(exit_layer=1, num_speculative_tokens=2), new=new)
    assert steps <= set(seen.steps)


@pytest.mark.product
@pytest.mark.parametrize("threshold", [0.6, "adaptive"])
def test_layerskip_standard_has_the_exact_law_over_five_tokens(model: Any, threshold: Any) -> None:
    method = LayerSkip(exit_layer=1, num_speculative_tokens=3, confidence_threshold=threshold)
    assert max(proves(model, method, new=5).lengths) == 3


@pytest.mark.slow
def test_layerskip_without_cache_reuse_has_the_exact_law(model: Any) -> None:
    seen = proves(model, LayerSkip(exit_layer=1, num_speculative_tokens=2, reuse_cache=False))
    assert {(2, 0), (2, 1), (2, 2)} <= set(seen.steps)


@pytest.mark.slow
def test_an_adaptive_confidence_threshold_keeps_the_law(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft lengths that depend on what became of earlier drafts. The step is made so large that the threshold does move
    past the confidences within one text."""
    monkeypatch.setattr(ConfidenceRule, "STEP", 4.0)
    watched: list[Any] = []
    update = ConfidenceRule.update

    def watching(self: ConfidenceRule, verdicts: Any) -> None:
        update(self, verdicts)
        watched.append(self.thresholds[0])

    monkeypatch.setattr(ConfidenceRule, "update", watching)
    seen = proves(model, LayerSkip(exit_layer=1, num_speculative_tokens=2, confidence_threshold="adaptive"))
    assert min(watched) < 0.5
    assert max(watched) > 0.7
    assert {(2, 0), (1, 0), (1, 1)} <= set(seen.steps)


def test_warpers_keep_the_law(model: Any) -> None:
    """top-k cuts a token off on both sides; temperature reshapes p and q."""
    method = LayerSkip(exit_layer=1, num_speculative_tokens=2)
    own = [TemperatureLogitsWarper(0.75), TopKLogitsWarper(2)]
    seen = proves(model, method, warpers=own, temperature=0.75, top_k=2)
    assert seen.steps[2, 2] > 0
    assert seen.steps[2, 0] > 0


@pytest.mark.slow
def test_other_warpers_keep_the_law(model: Any) -> None:
    method = LayerSkip(exit_layer=1, num_speculative_tokens=2)
    own = [TemperatureLogitsWarper(2.0), TopPLogitsWarper(0.75), MinPLogitsWarper(0.25)]
    seen = proves(model, method, warpers=own, temperature=2.0, top_p=0.75, min_p=0.25)
    assert seen.steps[2, 0] > 0


@pytest.mark.parametrize("new", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_row_processors_keep_the_law(model: Any, new: int) -> None:
    """Processors see the committed text and the path of the draft, on both sides of the acceptance test."""
    method = LayerSkip(exit_layer=1, num_speculative_tokens=2)
    seen = proves(model, method, processors=[RepetitionPenaltyLogitsProcessor(1.7), Pushing()], new=new)
    assert seen.steps[new - 2, new - 2] > 0
    assert seen.steps[new - 2, 0] > 0


@pytest.mark.slow
def test_warpers_without_a_vectorised_form_keep_the_law(model: Any) -> None:
    own = [TemperatureLogitsWarper(1.5), TypicalLogitsWarper(0.8)]
    seen = proves(model, LayerSkip(exit_layer=1, num_speculative_tokens=2), own=own)
    assert seen.steps[2, 0] > 0


MATCHED: dict[str, dict[str, Any]] = {
    "plain": {},
    "processors": {"processors": [RepetitionPenaltyLogitsProcessor(1.7), Pushing()]},
    "warpers": {"warpers": [TemperatureLogitsWarper(1.5), TopPLogitsWarper(0.75)], "temperature": 1.5, "top_p": 0.75},
}
FAST = (("chain", "plain"), ("tree", "processors"), ("tree", "warpers"))


@pytest.mark.parametrize(
    ("nodes", "branching", "settings"),
    [
        pytest.param(
            nodes, branching, MATCHED[name], id=f"{shape}-{name}", marks=[] if (shape, name) in FAST else pytest.mark.slow
        )
        for shape, nodes, branching in (("chain", 2, 0.0), ("tree", 5, 0.7))
        for name in MATCHED
    ],
)
def test_match_keeps_the_law_for_deterministic_drafts(model: Any, nodes: int, branching: float, settings: Any) -> None:
    seen = proves(model, Trees(nodes=nodes, branching=branching, seed=5), **settings)
    assert any(accepted >= 1 for _, accepted in seen.steps)
    assert any(drafted > accepted for drafted, accepted in seen.steps)
    assert max(seen.lengths) >= min(nodes, 3)


NATIVE: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Autoregressive(), {}),
    "layerskip": (LayerSkip(exit_layer=1, num_speculative_tokens=2), {}),
    "layerskip, thresholds": (LayerSkip(exit_layer=1, num_speculative_tokens=2, confidence_threshold=0.6), {}),
    "layerskip, warpers": (
        LayerSkip(exit_layer=1, num_speculative_tokens=2),
        {"warpers": [TemperatureLogitsWarper(0.75), TopKLogitsWarper(2)], "temperature": 0.75, "top_k": 2},
    ),
    "trees": (Trees(nodes=5, branching=0.7, seed=5), MATCHED["processors"]),
}


@pytest.mark.skipif(library.missing() is not None, reason=str(library.missing()))
@pytest.mark.parametrize("name", slow_except(["layerskip, warpers", "trees"], NATIVE))
def test_the_law_is_exact_on_the_native_engine(name: str) -> None:
    """To 1e-9, although it computes in float32: what it computes for a token has the same bits in every pass."""
    method, settings = NATIVE[name]
    seen = proves(llama(vocab=VOCAB, hidden=8, layers=2, head=2.0, seed=2), method, native=True, **settings)
    if name != "plain":
        assert any(accepted for _, accepted in seen.steps)
        assert any(drafted > accepted for drafted, accepted in seen.steps)


def second_token(law: Law) -> list[float]:
    """Marginal law of the first token that a decoding step yields."""
    return [sum(weight for text, weight in law.items() if text[1] == token) for token in range(2)]


SUPPORTS = [
    ((0.0, 0.5, 0.5), (0.5, 0.5, 0.0)),
    ((1.0, 0.0, 0.0), (0.25, 0.25, 0.5)),
    ((0.25, 0.25, 0.5), (0.0, 0.0, 1.0)),
    ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0)),
    ((0.2, 0.3, 0.5), (0.2, 0.3, 0.5)),
]


@pytest.mark.parametrize(("p", "q"), SUPPORTS)
def test_the_law_is_exact_where_supports_differ(p: tuple[float, ...], q: tuple[float, ...]) -> None:
    fake: Any = Tabled(p, q)
    found = loop_law(LayerSkip(exit_layer=1, num_speculative_tokens=2), fake, PROMPT, 4, Sampling(temperature=1.0))
    assert distance(found, exact_law(lambda _: p, 4, VOCAB)) < EXACT


@dataclass(frozen=True)
class Literal(LayerSkip):
    """AdaDecode's Equation 1 read literally: the drawn token's own probability is tested, and a token that fails is dropped."""

    def create_drafter(self, model: Any, rows: int, capacity: int) -> LayerSkipDrafter:
        return LiteralDrafter(self, model, rows)


class LiteralDrafter(LayerSkipDrafter):
    def propose_draft(self, limits: list[int], stop_rule: SurvivalThresholds | None = None) -> Draft:
        draft = super().propose_draft(limits, stop_rule)
        if draft.q is not None:
            drawn = draft.q.gather(2, draft.tokens[:, :, None]).squeeze(2)
            draft.valid = draft.valid & (drawn >= 0.75).long().cumprod(1).bool()
        return draft


def test_dropping_a_drawn_token_biases_the_text() -> None:
    """METHODS section 3: p = q = (.8, .2) with threshold .75 emits (.96, .04). The enumeration sees it, and the same test
    on what is known before the draw does no harm."""
    fake: Any = Tabled((0.8, 0.2), (0.8, 0.2))
    literal = loop_law(Literal(exit_layer=1, num_speculative_tokens=1), fake, PROMPT, 3, Sampling(temperature=1.0))
    assert second_token(literal) == pytest.approx([0.96, 0.04], abs=EXACT)
    assert distance(literal, exact_law(lambda _: (0.8, 0.2), 3, 2)) > 0.05
    method = LayerSkip(exit_layer=1, num_speculative_tokens=1, confidence_threshold=0.75)
    right = loop_law(method, fake, PROMPT, 3, Sampling(temperature=1.0))
    assert second_token(right) == pytest.approx([0.8, 0.2], abs=EXACT)
    assert distance(right, exact_law(lambda _: (0.8, 0.2), 3, 2)) < EXACT


SKIP = LayerSkip(exit_layer=1, num_speculative_tokens=2)
COOL: dict[str, Any] = {"warpers": [TemperatureLogitsWarper(0.5)], "temperature": 0.5}


def short(method: Any = SKIP, new: int = 3, **settings: Any) -> None:
    """One draft accepted or rejected, and what follows."""
    proves(llama(vocab=VOCAB, hidden=8, layers=2, head=2.0, seed=2).double(), method, new=new, **settings)


@planted.found_by(
    (planted.recovered_from_p, short),
    (planted.bonus_from_raw_logits, lambda: short(**COOL)),
    (planted.drawn_token_dropped, short),
    (planted.q_before_warpers, lambda: short(**COOL)),
    (planted.processors_blind_to_the_draft, lambda: short(processors=[Pushing()])),
    (planted.processors_blind_to_the_draft, lambda: short(Trees(nodes=5, branching=0.7, seed=5), 4, processors=[Pushing()])),
    (planted.noise_used_twice, lambda: short(new=4)),
    every=3,
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)


@pytest.mark.slow
def test_stopping_on_a_fixed_confidence_keeps_the_law(model: Any) -> None:
    seen = proves(model, LayerSkip(exit_layer=1, num_speculative_tokens=2, confidence_threshold=0.6))
    assert seen.steps[1, 0] > 0
    assert seen.lengths >= {1, 2}
