"""The walk along a draft: equality with plain Python, rows apart from one another, and the name of what comes after it."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skipstone.decoding import verify
from skipstone.decoding.draft import Draft, Verdict
from skipstone.decoding.noise import TARGET, Noise
from tests.helpers import planted
from tests.helpers.tables import Table, as_probability, contextual, double, random_draft


def walk(draft: Draft, row: int, table: Table, seed: int, position: int) -> tuple[list[int], list[int]]:
    """`match` in plain Python, for one row: (accepted nodes, tokens)."""
    parents = range(-1, draft.width - 1) if draft.parents is None else draft.parents[row].tolist()
    node, path, tokens = -1, [], []
    while True:
        p = double([table(tokens)])
        tokens.append(int(Noise(torch.tensor([seed])).draw(p, torch.tensor([position + len(path)]), TARGET)))
        for child in range(draft.width):
            offered = bool(draft.valid[row, child]) and (draft.candidate is None or bool(draft.candidate[row, child]))
            if offered and parents[child] == node and int(draft.tokens[row, child]) == tokens[-1]:
                node = child
                path.append(child)
                break
        else:
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
    """p = q accepts everything that may be accepted: the walk ends at the barred node, whose place is drawn from p."""
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
    (planted.one_draft_too_many, lambda: test_match_greedy_equals_match_at_temperature_zero(chain=True, barred=False)),
    (planted.barred_nodes_accepted, lambda: test_match_equals_a_plain_python_walk(chain=False)),
)
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
