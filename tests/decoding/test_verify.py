"""The acceptance rules in float64: their identity, the exact law of a step, and the walk along a draft in plain Python."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from scipy.spatial.distance import jensenshannon
from torch import Tensor

from skipstone.decoding import verify
from skipstone.decoding.draft import Draft, Verdict
from skipstone.decoding.noise import DRAFT, TARGET, Noise, substream
from tests.helpers import planted
from tests.helpers.enumeration import Chooser, Tracking, distance, exact_law, explore

EXACT = 1e-12
Table = Callable[[Sequence[int]], list[float]]
"""Tokens of a path -> the distribution of the next one."""


def double(rows: Any) -> Tensor:
    return torch.tensor(rows, dtype=torch.double)


def contextual(rows: list[list[float]]) -> Table:
    return lambda path: rows[sum((place + 1) * (token + 1) for place, token in enumerate(path)) % len(rows)]


def as_probability(table: Table) -> verify.Probability:
    def p(node: Tensor, path: Tensor, *_: Any) -> Tensor:
        return double([table(row) for row in path.tolist()])

    return p


def random_draft(dice: random.Random, rows: int, width: int, vocab: int, chain: bool = False) -> Draft:
    """A ragged draft: trees with invalid nodes in between and nodes that may not be accepted, or chains of any length."""
    tokens = torch.tensor([[dice.randrange(vocab) for _ in range(width)] for _ in range(rows)], dtype=torch.long)
    valid = torch.zeros_like(tokens, dtype=torch.bool)
    parents = torch.full_like(tokens, -1)
    candidate = torch.tensor([[dice.random() < 0.8 for _ in range(width)] for _ in range(rows)], dtype=torch.bool)
    for row in range(rows):
        if chain:
            valid[row, : dice.randint(0, width)] = True
            continue
        for node in range(width):
            above = dice.choice([-1, *[n for n in range(node) if valid[row, n]]])
            sisters = [n for n in range(node) if valid[row, n] and parents[row, n] == above]
            parents[row, node] = above
            valid[row, node] = dice.random() < 0.8 and int(tokens[row, node]) not in tokens[row, sisters].tolist()
    draft = Draft(tokens, valid, None, parents=None if chain else parents, candidate=candidate)
    draft.check()
    return draft


@st.composite
def distributions(draw: Any, count: int = 2, largest: int = 6) -> list[list[float]]:
    """`count` distributions over one vocabulary of at most `largest`, with zeros, one-hots and equal ones among them."""
    vocab = draw(st.integers(2, largest))
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


@settings(max_examples=5, deadline=None, derandomize=True)
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
    tried = given(distributions(4), st.integers(0, 10_000))(assert_given_nodes_are_one_hot)
    settings(max_examples=examples, deadline=None, derandomize=True)(tried)()


def drawn_tree(noise: Any, drafter: Table, width: int, vocab: int) -> Draft:
    """A chain from token 0 of every place, and further tokens of the place as leaves; their number depends on the path.

    Tokens with q = 0 come last: they are given, not drawn."""
    chain, leaves, q = [], [], []
    for place in range(width):
        path = [token for _, token in chain]
        q.append(drafter(path))
        drawn = noise.race(double([q[-1]]), torch.tensor([1 + place]), substream(DRAFT, place))[0].argsort(descending=True)
        first, *others = drawn[: 1 + (vocab - 1 + place + sum(path)) % vocab].tolist()
        chain.append((place - 1, first))
        leaves += [(place - 1, token) for token in others]
    parents, tokens = zip(*chain, *leaves, strict=True)
    valid = torch.ones(1, len(tokens), dtype=torch.bool)
    return Draft(torch.tensor([tokens]), valid, None, parents=torch.tensor([parents]), q=double([q]), levels=width)


def assert_trees_have_the_law(rows: list[list[float]], width: int = 2) -> None:
    """Sum of P(tree) P(text | tree) over all trees that can be drawn = P(text), for texts of two tokens."""
    vocab, target, drafter = len(rows[0]), contextual(rows[:3]), contextual(rows[3:])

    def step(chooser: Chooser) -> tuple[int, ...]:
        noise: Any = Tracking(chooser)
        draft = drawn_tree(noise, drafter, width, vocab)
        draft.check()
        verdict = verify.recursive_rejection(draft, as_probability(target), torch.tensor([1]), noise)
        nodes, tokens = verdict.path[0, : int(verdict.accepted)].tolist(), verdict.tokens[0].tolist()
        assert draft.tokens[0, nodes].tolist() == tokens[: len(nodes)]
        assert parents_of(draft, nodes) == [-1, *nodes][: len(nodes)]
        return completed(verdict, chooser, target, 2)

    assert distance(explore(step), exact_law(target, 2, vocab)) < EXACT


def parents_of(draft: Draft, nodes: list[int]) -> list[int]:
    assert draft.parents is not None
    return draft.parents[0, nodes].tolist()


@pytest.mark.parametrize(("width", "examples"), [(1, 8), (2, 3), pytest.param(2, 20, marks=pytest.mark.slow)])
def test_recursive_rejection_on_drawn_trees_has_the_exact_law(width: int, examples: int) -> None:
    tried = given(distributions(6, largest=3))(lambda rows: assert_trees_have_the_law(rows, width))
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


P, Q, SURE = [0.2, 0.3, 0.5], [0.6, 0.3, 0.1], [0.8, 0.1, 0.1]
"""Far apart; P is above SURE in two places. Planted bugs meet these only, because to shrink a failing example takes long."""


def walk(draft: Draft, row: int, table: Table, seed: int, position: int) -> tuple[list[int], list[int]]:
    """`match` in plain Python, for one row: (accepted nodes, tokens)."""
    parents = range(-1, draft.width - 1) if draft.parents is None else draft.parents[row].tolist()
    allowed = draft.valid[row] if draft.candidate is None else draft.valid[row] & draft.candidate[row]
    node, path, tokens = -1, list[int](), list[int]()
    while node is not None:
        place = torch.tensor([position + len(path)])
        tokens.append(int(Noise(torch.tensor([seed])).draw(double([table(tokens)]), place, TARGET)))
        children = (child for child in range(draft.width) if allowed[child] and parents[child] == node)
        node = next((child for child in children if draft.tokens[row, child] == tokens[-1]), None)
        path += [] if node is None else [node]
    return path, tokens


@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
def test_match_equals_a_plain_python_walk(chain: bool) -> None:
    """Random ragged drafts over three tokens, 4 rows at once. Nodes barred by `candidate` stop the walk."""
    dice = random.Random(5)
    deepest = barred = 0
    for trial in range(80):
        rows = [[dice.random() ** 3 for _ in range(3)] for _ in range(7)]
        draft = random_draft(dice, rows=4, width=dice.randint(1, 12), vocab=3, chain=chain)
        seeds, position = torch.arange(4) + 10 * trial, torch.tensor([3, 9, 4, 100])
        verdict = verify.match(draft, as_probability(contextual(rows)), position, Noise(seeds))
        assert verdict.path.shape == draft.tokens.shape
        assert verdict.tokens.shape == (4, draft.width + 1)
        for row in range(4):
            path, tokens = walk(draft, row, contextual(rows), int(seeds[row]), int(position[row]))
            count = int(verdict.accepted[row])
            assert verdict.path[row, :count].tolist() == path
            assert verdict.tokens[row, : count + 1].tolist() == tokens
            deepest = max(deepest, count)
            assert draft.candidate is not None
            barred += not bool(draft.candidate[row].all())
            assert bool(draft.candidate[row, path].all())
    assert deepest >= 3
    assert barred > 60


@pytest.mark.parametrize("barred", [False, True])
@pytest.mark.parametrize("chain", [False, True], ids=["tree", "chain"])
def test_match_greedy_equals_match_at_temperature_zero(chain: bool, barred: bool) -> None:
    """Known picks per node, walked on the host, against one-hot distributions."""
    dice = random.Random(8)
    accepted = 0
    for _ in range(80):
        draft = random_draft(dice, rows=3, width=dice.randint(0, 7), vocab=3, chain=chain)
        if not barred:
            draft.candidate = None
        picks = torch.tensor([[dice.randrange(3) for _ in range(draft.width + 1)] for _ in range(3)])
        one_hot = torch.nn.functional.one_hot(picks, 3).double()

        def p(node: Tensor, _path: Tensor, *_: Any, table: Tensor = one_hot) -> Tensor:
            return table[torch.arange(3), node + 1]

        fast = verify.match_greedy(draft, picks)
        slow = verify.match(draft, p, torch.zeros(3, dtype=torch.long), Noise(torch.arange(3)))
        assert fast.tolist(draft) == slow.tolist(draft)
        if chain:
            assert fast.accepted.tolist() == slow.accepted.tolist()
        accepted += int(slow.accepted.sum())
    assert accepted > 30


def drawn_chains(dice: np.random.Generator, rows: int, width: int, vocab: int) -> tuple[Draft, Tensor]:
    """(ragged chains with q and some given tokens, p of every node [rows, width + 1, vocab])."""
    q = double(dice.dirichlet([0.7] * vocab, (rows, width)))
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=torch.Generator().manual_seed(0)).reshape(rows, width)
    lengths = torch.tensor(dice.integers(0, width + 1, rows))
    valid = torch.arange(width) < lengths[:, None]
    draft = Draft(tokens, valid, None, q=q, stochastic=torch.tensor(dice.random((rows, width)) < 0.8))
    p = double(dice.dirichlet([0.7] * vocab, (rows, width + 1)))
    p[:, :-1] = 0.5 * p[:, :-1] + 0.5 * q
    return draft, p


def test_leviathan_treats_every_row_as_it_would_alone() -> None:
    """Ragged chains in one batch: a row's verdict does not depend on its neighbours, nor on the padding behind its end."""
    rows, width = 120, 5
    draft, p = drawn_chains(np.random.default_rng(0), rows, width, vocab=4)
    seeds, position = torch.arange(rows), torch.arange(rows) * 3
    together = verify.leviathan(draft, lambda node, *_: p[torch.arange(rows), node + 1], position, Noise(seeds))
    at_once = verify.leviathan(draft, p, position, Noise(seeds))
    assert torch.equal(at_once.accepted, together.accepted)
    assert torch.equal(at_once.tokens, together.tokens), "all of p at once gives the same as node by node"
    assert set(at_once.accepted.tolist()) == {0, 1, 2, 3, 4, 5}
    assert draft.q is not None
    assert draft.stochastic is not None
    outcomes = set()
    for row in range(rows):
        length = int(draft.valid[row].sum())
        cut = (slice(row, row + 1), slice(0, length))
        alone = Draft(draft.tokens[cut], draft.valid[cut], None, q=draft.q[cut], stochastic=draft.stochastic[cut])
        own = verify.leviathan(
            alone,
            lambda node, *_, row=row: p[row : row + 1, int(node) + 1],
            position[row : row + 1],
            Noise(seeds[row : row + 1]),
        )
        count = int(own.accepted)
        assert count == int(together.accepted[row]) <= length
        assert own.tokens[0, : count + 1].tolist() == together.tokens[row, : count + 1].tolist()
        outcomes.add((count == length, count > 0))
    assert outcomes == {(True, True), (True, False), (False, True), (False, False)}


def test_leviathan_never_accepts_a_node_that_is_no_candidate() -> None:
    """p = q accepts every node but the barred one. The walk ends there and draws a token from p."""
    q = torch.full((1, 3, 4), 0.25, dtype=torch.double)
    draft = Draft(torch.tensor([[0, 1, 2]]), torch.ones(1, 3, dtype=torch.bool), None, q=q)
    draft.candidate = torch.tensor([[True, False, True]])
    seen = set()
    for seed in range(60):
        noise = Noise(torch.tensor([seed]))
        verdict = verify.leviathan(draft, lambda *_: q[:, 0], torch.tensor([4]), noise)
        assert int(verdict.accepted) == 1
        seen.add(int(verdict.tokens[0, verdict.accepted[0]]))
    assert seen == {0, 1, 2, 3}


def test_what_follows_the_accepted_tokens_is_named() -> None:
    """A rejected candidate makes the next token recovered; without a candidate it is the bonus token."""
    tokens, valid = torch.tensor([[5, 6]] * 4), torch.tensor([[True, True], [True, True], [True, False], [False, False]])
    chain, tree = Draft(tokens, valid, None), Draft(tokens, valid, None, parents=torch.tensor([[-1, -1]] * 4))
    verdict = Verdict(torch.tensor([[0, 1]] * 4), torch.tensor([[5, 6, 7]] * 4), torch.tensor([1, 2, 1, 0]))

    def finals(draft: Draft) -> list[str]:
        return [row.final for row in verdict.tolist(draft)]

    assert finals(chain) == ["recovered", "bonus", "bonus", "bonus"]
    assert [row.drafted for row in verdict.tolist(chain)] == [2, 2, 1, 0]
    origins = [row.origin for row in verdict.tolist(chain)]
    assert origins == [["draft", "recovered"], ["draft", "draft", "bonus"], ["draft", "bonus"], ["bonus"]]
    chain.candidate = torch.tensor([[True, False]] * 4)
    assert finals(chain) == finals(tree) == ["bonus"] * 4
    verdict.accepted = torch.zeros(4, dtype=torch.long)
    assert finals(tree) == ["recovered", "recovered", "recovered", "bonus"]


@planted.found_by(
    (planted.recovered_from_p, lambda: assert_mass_adds_up([P, Q])),
    (planted.recovered_from_p, lambda: assert_trees_have_the_law([P, P, Q, SURE, SURE, P])),
    (planted.siblings_not_renormalised, lambda: assert_trees_have_the_law([P, P, Q, SURE, SURE, P])),
    (planted.siblings_drawn_with_replacement, lambda: assert_trees_have_the_law([P, P, Q, SURE, SURE, P])),
    (planted.given_tokens_taken_as_drawn, lambda: assert_given_nodes_are_one_hot([P, Q, P, Q], 0)),
    (planted.given_tokens_taken_as_drawn, lambda: assert_given_nodes_are_one_hot([P, Q, P, Q], 1)),
    (planted.one_draft_too_many, lambda: test_match_greedy_equals_match_at_temperature_zero(chain=True, barred=False)),
    (planted.barred_nodes_accepted, lambda: test_match_equals_a_plain_python_walk(chain=False)),
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
