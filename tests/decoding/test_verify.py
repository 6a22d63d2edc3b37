"""The acceptance rules in float64: the identity behind them, and the exact law of a single step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.distance import jensenshannon

from skipstone.decoding import verify
from skipstone.decoding.draft import Draft, Verdict
from skipstone.decoding.noise import DRAFT, substream
from tests.helpers import planted
from tests.helpers.enumeration import Chooser, Tracking, distance, exact_law, explore
from tests.helpers.tables import Table, as_probability, contextual, double, random_draft

EXACT = 1e-12


@st.composite
def distributions(draw: Any, count: int = 2) -> list[list[float]]:
    """`count` distributions over one vocabulary, with zeros, one-hots and equal ones among them."""
    vocab = draw(st.integers(2, 6))
    found: list[list[float]] = []
    for _ in range(count):
        kind = draw(st.sampled_from(["any", "any", "sparse", "one-hot", "same"]))
        weights = draw(st.lists(st.integers(int(kind == "any"), 1000), min_size=vocab, max_size=vocab))
        if kind == "one-hot" or not any(weights):
            hot = draw(st.integers(0, vocab - 1))
            weights = [int(place == hot) for place in range(vocab)]
        found.append(found[-1] if kind == "same" and found else [weight / sum(weights) for weight in weights])
    return found


def assert_mass_adds_up(pair: list[list[float]]) -> None:
    """q min(1, p/q) + (1 - alpha) residual = p: the identity that makes rejection sampling exact."""
    p, q = double(pair)
    kept = q * torch.where(q > 0, p / q, 1.0).clamp(max=1)
    alpha = kept.sum()
    composed = kept + (1 - alpha) * verify.residual(p, q)
    assert (composed - p).abs().max() < EXACT
    assert verify.residual(p, q).sum() == pytest.approx(1, abs=EXACT)


@settings(derandomize=True, deadline=None)
@given(distributions())
def test_accepted_and_residual_mass_add_up_to_p(pair: list[list[float]]) -> None:
    assert_mass_adds_up(pair)


def completed(verdict: Verdict, chooser: Chooser, table: Table, total: int) -> tuple[int, ...]:
    """The first `total` committed tokens; plain draws fill them up, so that texts of one length can be compared."""
    tokens = verdict.tokens[0, : int(verdict.accepted[0]) + 1].tolist()[:total]
    while len(tokens) < total:
        tokens.append(chooser.choose(table(tokens), ("rest", len(tokens))))
    return tuple(tokens)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(distributions(6), st.integers(1, 3))
def test_leviathan_on_a_drawn_chain_has_the_exact_law(rows: list[list[float]], width: int) -> None:
    vocab, target, drafter = len(rows[0]), contextual(rows[:3]), contextual(rows[3:])
    if vocab**width > 27:
        width = 2

    def step(chooser: Chooser) -> tuple[int, ...]:
        noise: Any = Tracking(chooser)
        tokens: list[int] = []
        for place in range(width):
            drawn = noise.draw(double([drafter(tokens)]), torch.tensor([5 + place]), substream(DRAFT, place))
            tokens.append(int(drawn))
        q = double([[drafter(tokens[:place]) for place in range(width)]])
        draft = Draft(torch.tensor([tokens]), torch.ones(1, width, dtype=torch.bool), None, q=q)
        verdict = verify.leviathan(draft, as_probability(target), torch.tensor([5]), noise)
        return completed(verdict, chooser, target, width + 1)

    assert distance(explore(step), exact_law(target, width + 1, vocab)) < EXACT


def assert_given_nodes_are_one_hot(rows: list[list[float]], seed: int) -> None:
    """One of two nodes is drawn and the other given: the step has the exact law, whatever the q of the given one is."""
    vocab, target, dice = len(rows[0]), contextual(rows[:3]), random.Random(seed)
    given_first, fixed = bool(dice.getrandbits(1)), dice.randrange(vocab)
    stochastic = torch.tensor([[not given_first, given_first]])

    def step(chooser: Chooser) -> tuple[int, ...]:
        noise: Any = Tracking(chooser)
        drawn = int(noise.draw(double([rows[3]]), torch.tensor([1]), substream(DRAFT, 0)))
        tokens = torch.tensor([[fixed, drawn] if given_first else [drawn, fixed]])
        draft = Draft(tokens, torch.ones(1, 2, dtype=torch.bool), None, q=double([[rows[3], rows[3]]]), stochastic=stochastic)
        verdict = verify.leviathan(draft, as_probability(target), torch.tensor([1]), noise)
        return completed(verdict, chooser, target, 3)

    assert distance(explore(step), exact_law(target, 3, vocab)) < EXACT


@pytest.mark.parametrize("examples", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_leviathan_takes_nodes_that_were_not_drawn_as_one_hot(examples: int) -> None:
    """`stochastic` False: the token is given (a lookup, say)."""
    tried = given(distributions(4), st.integers(0, 10_000))(assert_given_nodes_are_one_hot)
    settings(max_examples=examples, deadline=None, derandomize=True)(tried)()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(distributions(3), st.integers(0, 10_000))
def test_match_on_a_given_tree_has_the_exact_law(rows: list[list[float]], seed: int) -> None:
    vocab, target = len(rows[0]), contextual(rows)
    draft = random_draft(random.Random(seed), rows=1, width=5, vocab=vocab)

    def step(chooser: Chooser) -> tuple[int, ...]:
        noise: Any = Tracking(chooser)
        verdict = verify.match(draft, as_probability(target), torch.tensor([1]), noise)
        return completed(verdict, chooser, target, 3)

    assert distance(explore(step), exact_law(target, 3, vocab)) < EXACT


@settings(derandomize=True, deadline=None, max_examples=50)
@given(distributions())
def test_entropy_and_js_distance_are_scipys(pair: list[list[float]]) -> None:
    """Bits and the square root of the divergence; 1e-7 because a root of rounding errors is taken if p = q."""
    p, q = double(pair)
    assert float(verify.entropy(p)) == pytest.approx(stats.entropy(pair[0], base=2), abs=EXACT)
    assert float(verify.entropy(p, base=np.e)) == pytest.approx(stats.entropy(pair[0]), abs=EXACT)
    found = float(verify.js_distance(p, q))
    assert found == pytest.approx(np.nan_to_num(jensenshannon(pair[0], pair[1], base=2)), abs=1e-7)
    assert found == float(verify.js_distance(q, p))
    assert 0 <= found <= 1
    assert found == 0 or pair[0] != pair[1]


P, Q = [0.2, 0.3, 0.5], [0.6, 0.3, 0.1]
"""Far apart. Planted bugs meet this example only, because to shrink a failing one takes long."""


@planted.found_by(
    (planted.recovered_from_p, lambda: assert_mass_adds_up([P, Q])),
    (planted.given_tokens_taken_as_drawn, lambda: assert_given_nodes_are_one_hot([P, Q, P, Q], 0)),
    (planted.given_tokens_taken_as_drawn, lambda: assert_given_nodes_are_one_hot([P, Q, P, Q], 1)),
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    proof()
    planted.assert_found(plant, proof, monkeypatch)
