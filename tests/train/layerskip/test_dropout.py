"""Layer dropout: which rows are dropped, and that a batch with dropped rows is its rows run one by one through fewer layers."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from skipstone.models.decoder_model import DecoderModel
from skipstone.train.layerskip.dropout import forwards_replaced, kept_rows, layers_recorded, run_rows
from skipstone.train.layerskip.objective import LayerSkipObjective
from skipstone.train.layerskip.schedules import EarlyExitLoss, LayerDropout, LayerSkipRecipe
from tests.helpers import families
from tests.helpers.objectives import alone, outputs

PLAN = [[0, 1, 2], [0, 2], [], [1]]  # rows that each of four layers keeps
LENGTHS = (11, 4, 10)  # the sliding windows are 8 tokens
LAYERS, ROWS, STEPS = 4, 16, 400


def batch(lengths: Sequence[int] = LENGTHS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return families.padded([torch.randint(1, 97, (length,), generator=generator) for length in lengths])


def dropped(rates: Sequence[float], seed: int = 0, steps: int = STEPS, rows: int = ROWS) -> Tensor:
    """[steps, layers, rows] float64: 1 where a layer drops a row."""
    out = torch.ones(steps, len(rates), rows).double()
    for step in range(steps):
        for layer, kept in enumerate(kept_rows(rows, rates, seed, step)):
            out[step, layer, kept] = 0
    return out


# which rows


def test_rows_are_dropped_as_often_as_the_rates_say() -> None:
    rates = [0.0, 0.03, 0.25, 0.5, 0.9, 1.0]
    found = dropped(rates).mean((0, 2)).tolist()
    for rate, share in zip(rates, found, strict=True):
        assert abs(share - rate) <= 5 * math.sqrt(rate * (1 - rate) / (STEPS * ROWS))


def test_draws_of_other_layers_steps_rows_and_seeds_are_independent() -> None:
    draws = dropped([0.5] * LAYERS) - 0.5
    places = draws.flatten(0, 1)  # layer after layer, step after step
    for lag in range(1, 2 * LAYERS + 1):
        together = places[lag:] * places[:-lag]
        assert abs(together.mean()) < 5 * 0.25 / math.sqrt(together.numel()), f"{lag} layers apart"
    for lag in range(1, ROWS):
        for shift in (0, 1, LAYERS):  # also diagonally
            together = places[shift:, lag:] * places[: len(places) - shift, :-lag]
            assert abs(together.mean()) < 5 * 0.25 / math.sqrt(together.numel()), f"{lag} rows and {shift} layers apart"
    together = draws * (dropped([0.5] * LAYERS, seed=1) - 0.5)
    assert abs(together.mean()) < 5 * 0.25 / math.sqrt(together.numel())


def test_rows_depend_on_seed_and_step_alone() -> None:
    rates = [0.0, 0.3, 0.6]
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = kept_rows(8, rates, 5, 7)
    torch.rand(3)
    assert kept_rows(8, rates, 5, 7) == first
    torch.random.set_rng_state(state)
    kept_rows(8, rates, 5, 7)
    assert torch.random.get_rng_state().equal(state), "the global generator was used"
    assert [[row for row in kept if row < 3] for kept in first] == kept_rows(3, rates, 5, 7), "other rows of a larger batch"
    assert len({str(kept_rows(8, rates, seed, step)) for seed in range(5) for step in range(5)}) == 25
    kept = [set(kept_rows(8, [0.0, rate], 3, 0)[1]) for rate in (0.0, 0.2, 0.5, 0.8, 1.0)]
    assert kept == sorted(kept, key=len, reverse=True)
    assert all(fewer <= more for more, fewer in pairwise(kept)), "a higher rate drops the same rows and more"


def test_the_rows_of_a_seed_and_step_never_change() -> None:
    """A run resumes to the same losses only if another version of this package drops the same rows."""
    assert kept_rows(6, [0.0, 0.25, 0.5, 0.75], seed=7, step=11) == [[0, 1, 2, 3, 4, 5], [0, 3, 5], [1, 2, 4], [2, 3, 5]]


# a layer over some rows


def test_a_layer_of_lower_precision_leaves_the_stream_as_it_was() -> None:
    out = run_rows(lambda hidden: hidden.bfloat16() * 3, [1], torch.full((2, 1, 1), 1 / 3))
    assert out.dtype == torch.float32
    assert out[0].item() == pytest.approx(1 / 3, abs=1e-7)


# layers that are replaced


def test_layers_have_their_own_forward_again_also_after_an_error_and_when_nested() -> None:
    layers = [nn.Linear(2, 2) for _ in range(2)]
    own = layers[1].forward = lambda x: x * 2  # type: ignore[method-assign]

    def plus(_: int, forward: Any) -> Any:
        return lambda x: forward(x) + 1

    with forwards_replaced(layers, plus), forwards_replaced(layers, plus):
        assert layers[1](torch.zeros(1)).item() == 2
    assert "forward" not in layers[0].__dict__
    assert layers[1].__dict__["forward"] is own
    with pytest.raises(KeyError), forwards_replaced(layers, plus):
        raise KeyError
    assert "forward" not in layers[0].__dict__
    assert layers[1].__dict__["forward"] is own


# families


@pytest.mark.parametrize("name", families.NAMES)
@torch.no_grad()
def test_a_batch_with_dropped_rows_is_each_row_alone_through_the_layers_that_keep_it(name: str) -> None:
    model, inputs = families.cached(name), batch()
    modules = DecoderModel(model)
    with layers_recorded(modules.layers, [True] * LAYERS, PLAN) as states:
        found = modules.decoder(**inputs, use_cache=False).last_hidden_state
    plain = modules.decoder(**inputs, use_cache=False).last_hidden_state
    with layers_recorded(modules.layers, [True] * LAYERS, [[0, 1, 2]] * LAYERS):
        assert modules.decoder(**inputs, use_cache=False).last_hidden_state.equal(plain), "nothing is dropped"
    assert list(states) == [0, 1, 2, 3]
    for row in range(3):
        real = inputs["attention_mask"][row].bool()
        own, last = alone(modules, inputs, row, [row in kept for kept in PLAN])
        for layer, state in own.items():
            torch.testing.assert_close(states[layer][row][real], state[real], atol=2e-5, rtol=1e-5)
        torch.testing.assert_close(found[row][real], last[real], atol=2e-5, rtol=1e-5)
        assert (found[row] - plain[row])[real].abs().max() > 1e-2, "the dropped layers do nothing"


def rows_into(seen: dict[int, int], layer: int) -> Any:
    return lambda _module, args, kwargs: seen.__setitem__(layer, len((*args, *kwargs.values())[0]))


@pytest.mark.parametrize("name", ["llama", "falcon", "mixtral"])
@torch.no_grad()
def test_a_dropped_row_is_not_computed(name: str) -> None:
    model, seen = families.cached(name), dict[int, int]()
    modules = DecoderModel(model)
    with ExitStack() as hooks:
        for index, layer in enumerate(modules.layers):
            inside = getattr(layer, modules.family.attention)
            hooks.callback(inside.register_forward_pre_hook(rows_into(seen, index), with_kwargs=True).remove)
        with layers_recorded(modules.layers, [False] * LAYERS, PLAN) as states:
            modules.decoder(**batch(), use_cache=False)
    assert seen == {0: 3, 1: 2, 3: 1}
    assert not states


def rows_of_the_last_layer(p_max: float, ids: Tensor, step: int, micro: int) -> list[int]:
    """Which rows of a batch the last of four layers is run for."""
    recipe = LayerSkipRecipe(LayerDropout(p_max, "exponential"), EarlyExitLoss(0.2, "none"))
    objective = LayerSkipObjective(families.cached("llama"), recipe, steps=10, seed=4)
    objective.step, objective.micro = step, micro
    with torch.no_grad(), outputs(objective.modules.layers) as seen:
        objective.loss(ids, labels=ids)
    return [row for row in range(len(ids)) if not seen[3][row].equal(seen[2][row])]


def test_the_loss_drops_rows_by_the_rates_of_the_step_and_the_draws_of_the_pass() -> None:
    ids = torch.randint(1, 97, (8, 5), generator=torch.Generator().manual_seed(0))
    assert rows_of_the_last_layer(1.0, ids, 0, 3) == list(range(8)), "S(0) = 0"
    assert rows_of_the_last_layer(1.0, ids, 9, 3) == [], "S(T - 1) D(L - 1) p_max = 1"
    assert rows_of_the_last_layer(0.0, ids, 9, 3) == list(range(8))
    expected = [kept_rows(8, [0, 0.13, 0.29, 0.5], seed=4, step=micro)[3] for micro in range(6)]
    assert len({str(rows) for rows in expected}) > 3
    for content in (ids, ids.flip(1)):
        assert [rows_of_the_last_layer(0.5, content, 9, micro) for micro in range(6)] == expected


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "falcon"])
def test_a_constant_rate_of_one_leaves_a_row_of_the_first_layer_alone(name: str) -> None:
    """Falcon's layers return tuples, which only a layer that runs can show."""
    ids = torch.randint(1, 97, (3, 5), generator=torch.Generator().manual_seed(0))
    model = families.cached(name)
    recipe = LayerSkipRecipe(LayerDropout(1.0, by_layer="constant"), EarlyExitLoss(0.2, "none"))
    objective = LayerSkipObjective(model, recipe, steps=10, seed=4)
    embedded = model.get_input_embeddings()(ids)
    with outputs(objective.modules.layers) as seen:
        objective.loss(ids, labels=ids)
    assert not seen[0][0].equal(embedded[0])
    assert all(seen[0][row].equal(embedded[row]) for row in (1, 2))
    assert all(seen[layer].equal(seen[0]) for layer in (1, 2, 3))
