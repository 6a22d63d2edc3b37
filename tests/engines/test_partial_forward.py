"""Tokens on their way up the layers: finishing gives what a full forward gives, at whatever depth each token waits."""

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from skipstone import Autoregressive, Request
from skipstone.decoding.session import Session
from skipstone.engines.model_runner import ModelRunner
from skipstone.engines.partial_forward import PartialForward
from tests.helpers import planted
from tests.helpers.machine import llama, mistral, prompt, start
from tests.helpers.pairwise import round_robin

LENGTHS = (5, 12, 8)


def close(found: Tensor, expected: Tensor) -> None:
    """Logits are of size 10 to 50 here."""
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@dataclass
class Bench:
    """A session with its prompts in the store, and transformers' own forward over any continuation."""

    runner: ModelRunner
    session: Session
    texts: list[Tensor]

    @torch.inference_mode()
    def expected(self, row: int, path: list[int]) -> Tensor:
        """Logits after the row's text and a path [V]."""
        ids = torch.cat([self.texts[row], torch.tensor(path, dtype=torch.long)])[None]
        return self.runner.model(input_ids=ids).logits[0, -1]


def bench(model: Any, lengths: tuple[int, ...] = LENGTHS, room: int = 40) -> Bench:
    runner, requests = ModelRunner(model), [Request(prompt(length, length), room) for length in lengths]
    decoder = start(Autoregressive(), runner, requests)
    first = decoder.step().tokens
    texts = [torch.cat([request.prompt, torch.tensor(tokens)]) for request, tokens in zip(requests, first, strict=True)]
    return Bench(runner, decoder.session, texts)


def raise_rows(forward: PartialForward, rows: list[int], to: int) -> None:
    """`advance` for some rows only: the others look as if they were at the top already, so they stay where they wait."""
    before, others = forward.depth.copy(), [row for row in range(forward.rows) if row not in rows]
    forward.depth[others] = forward.top
    forward.advance(to)
    forward.depth[others] = before[others]


MODELS = [pytest.param(llama, id="llama"), pytest.param(lambda: mistral(window=6), id="sliding")]


@round_robin(build=MODELS, apart=[pytest.param(False, id="rows alike"), pytest.param(True, id="rows apart")])
@torch.inference_mode()
def test_tokens_waiting_at_mixed_depths_finish_like_a_full_forward(build: Any, apart: bool) -> None:
    """AdaDecode's pattern: a new token climbs to some layer while older ones ride along; depths 0 to 3 of 4 all occur, in one
    row and across rows."""
    dice, mixes = random.Random(3), []
    for trial in range(4):
        b, width = bench(build()), 5
        forward = b.session.view.start_forward([width] * 3)
        tokens = torch.tensor([[dice.randrange(97) for _ in range(width)] for _ in range(3)])
        for column in range(width + 1):
            falling = (3, 3, 2, 1, 1, 0)[column]
            for rows in [[0], [1], [2]] if apart else [[0, 1, 2]]:
                raise_rows(forward, rows, falling if trial == 0 and 0 in rows else dice.randint(0, 3))
            if column < width:
                forward.append(tokens[:, column : column + 1])
        mixes.append(forward.depth.tolist())
        logits = forward.finish()
        assert forward.depth.min() == 4
        for row in range(3):
            for column in range(width + 1):
                close(logits[row, column], b.expected(row, tokens[row, :column].tolist()))
    assert [3, 3, 2, 1, 1, 0] in mixes[0]
    assert apart == any(mix[0] != mix[1] for mix in mixes)


@pytest.mark.parametrize("build", MODELS)
@torch.inference_mode()
def test_a_tree_finishes_like_a_forward_over_each_of_its_paths(build: Any) -> None:
    dice = random.Random(1)
    for _ in range(4):
        b = bench(build())
        b.session.alive[1] = False
        width = 9
        parents = torch.tensor([[dice.randrange(-1, node) if node else -1 for node in range(width)] for _ in range(3)])
        tokens = torch.randint(0, 97, (3, width), generator=torch.Generator().manual_seed(dice.randrange(99)))
        valid = torch.ones(3, width, dtype=torch.bool)
        for row in range(3):
            for node in range(width):
                above = int(parents[row, node])
                valid[row, node] = dice.random() < 0.85 and (above < 0 or bool(valid[row, above]))
        forward = b.session.view.start_forward([width] * 3)
        forward.append(tokens, valid, parents)
        forward.advance(2)
        logits = forward.finish()
        assert bool(logits.isfinite().all())
        for row in (0, 2):
            paths: dict[int, list[int]] = {-1: []}
            for node in range(width):
                paths[node] = [*paths[int(parents[row, node])], int(tokens[row, node])]
            for node in [-1, *valid[row].nonzero().flatten().tolist()]:
                close(logits[row, node + 1], b.expected(row, paths[node]))


class Counted(ModelRunner):
    """Counts how often a token went through a layer."""

    work = 0

    def run(self, hidden: Tensor, at: Any, store: Any, layers: range, *args: Any, **kwargs: Any) -> Tensor:
        self.work += hidden.shape[1] * len(layers)
        return super().run(hidden, at, store, layers, *args, **kwargs)


@torch.inference_mode()
def test_every_token_goes_through_every_layer_once_and_restart_repeats_all() -> None:
    b = bench(llama())
    counted: Any = Counted(b.runner.model)
    b.session.view.model = counted
    tokens = torch.randint(0, 97, (3, 3), generator=torch.Generator().manual_seed(5))
    results, work = [], []
    for again in (False, True):
        counted.work = 0
        forward = b.session.view.start_forward([3] * 3)
        for column in range(3):
            forward.exit_logits(2)
            forward.append(tokens[:, column : column + 1])
        if again:
            forward.restart()
            assert forward.depth.max() == 0
        results.append(forward.finish())
        work.append(counted.work)
    assert work == [4 * 4, 3 * 2 + 4 * 4]
    close(results[0], results[1])
    for row in range(3):
        close(results[1][row, 3], b.expected(row, tokens[row].tolist()))


@torch.inference_mode()
def test_a_row_without_room_names_no_position_beyond_the_model() -> None:
    """Learned positions would be read out of range: the short row drafts up to the long row's last position only."""
    b = bench(llama(), lengths=(4, 10))
    forward = b.session.view.start_forward([6, 0])
    forward.append(torch.zeros(2, 6, dtype=torch.long), torch.tensor([[True] * 6, [False] * 6]))
    assert int(forward.positions.max()) == 10
    assert forward.positions[0].tolist() == list(range(4, 11))
    logits = forward.finish()
    close(logits[0, 6], b.expected(0, [0] * 6))
    close(logits[1, 0], b.expected(1, []))


@planted.found_by(
    (planted.siblings_see_one_another, lambda: test_a_tree_finishes_like_a_forward_over_each_of_its_paths(llama)),
    (
        planted.window_one_too_wide,
        lambda: test_a_tree_finishes_like_a_forward_over_each_of_its_paths(lambda: mistral(window=6)),
    ),
    (planted.draft_not_run_again, test_every_token_goes_through_every_layer_once_and_restart_repeats_all),
    (
        planted.waiting_tokens_left_behind,
        lambda: test_tokens_waiting_at_mixed_depths_finish_like_a_full_forward(llama, apart=True),
    ),
)
@pytest.mark.usefixtures("eager_engine")
def test_planted_bugs_are_found(plant: Any, proof: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planted.assert_found(plant, proof, monkeypatch)
