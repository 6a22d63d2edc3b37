"""LayerSkip's formulas against numbers worked out by hand, the paper's settings, and every setting that must be refused."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skipstone.train.layerskip.schedules import (
    PRESETS,
    EarlyExitLoss,
    LayerDropout,
    LayerSkipRecipe,
    dropout_by_layer,
    dropout_by_step,
    exit_scale,
    gradual,
    rotational,
)

# L = 5, T = 10, e_scale = .2 by hand: D(l) = 2^(l/4) - 1, S(t) = 2^(t/9) - 1,
# e = 0, .2 x 1, .2 x (1 + 2), .2 x (1 + 2 + 3), and for the last layer 4 + .2 x (1 + 2 + 3)
L, T = 5, 10
BY_LAYER = [0, 0.18920712, 0.41421356, 0.68179283, 1]
BY_STEP = [0, 0.08005974, 0.16652904, 0.25992105, 0.36079000, 0.46973449, 0.58740105, 0.71448797, 0.85174942, 1]
SCALES = [0, 0.2, 0.6, 1.2, 5.2]
NAN = float("nan")


def about(values: Any) -> Any:
    return pytest.approx(values, abs=1e-8)


def layers_of(active: list[bool]) -> list[int]:
    return [layer for layer, on in enumerate(active) if on]


def test_the_rates_of_layers_and_steps_grow_from_0_to_1() -> None:
    assert [dropout_by_layer(layer, L) for layer in range(L)] == about(BY_LAYER)
    assert dropout_by_layer(31, 32) == 1
    assert dropout_by_layer(12, 25) == about(math.sqrt(2) - 1)
    assert [dropout_by_step(step, T) for step in range(T)] == about(BY_STEP)


def test_the_scale_of_an_exit_is_the_sum_of_the_layers_up_to_it_and_the_last_one_has_its_own() -> None:
    assert [exit_scale(layer, L, 0.2) for layer in range(L)] == about(SCALES)
    assert [exit_scale(layer, L, 0.0) for layer in range(L)] == [0, 0, 0, 0, 4]
    assert [exit_scale(layer, L, 1.0) for layer in range(L)] == [0, 1, 3, 6, 10]


def test_the_rotation_enables_every_third_layer_and_moves_by_one() -> None:
    found = [layers_of(rotational(step, L, 3)) for step in range(5)]
    assert found == [[0, 3], [1, 4], [2], [0, 3], [1, 4]]
    assert layers_of(rotational(39, 40, 39)) == layers_of(rotational(0, 40, 39)) == [0, 39]


def test_the_gradual_curriculum_adds_a_layer_from_the_top_every_t_over_2l_steps() -> None:
    assert [layers_of(gradual(step, L, T)) for step in range(5)] == [[4], [3, 4], [2, 3, 4], [1, 2, 3, 4], [0, 1, 2, 3, 4]]
    assert layers_of(gradual(9, L, T)) == [0, 1, 2, 3, 4]
    assert [sum(gradual(step, L, 40)) for step in (0, 3, 4, 7, 8, 15, 16, 39)] == [1, 1, 2, 2, 3, 4, 5, 5]
    assert [sum(gradual(step, L, 15)) for step in range(7)] == [1, 1, 2, 3, 3, 4, 5]  # a layer every 1.5 steps


def test_rates_are_the_product_of_layer_step_and_maximum() -> None:
    flat = LayerDropout(0.1)
    assert flat.rates(0, L, T) == flat.rates(9, L, T) == about([0, 0.018920712, 0.041421356, 0.068179283, 0.1])
    growing = LayerDropout(0.4, "exponential")
    assert growing.rates(0, L, T) == [0] * L
    assert growing.rates(3, L, T) == about([0.4 * 0.25992105 * rate for rate in BY_LAYER])
    assert growing.rates(9, L, T) == about([0.4 * rate for rate in BY_LAYER])
    constant = LayerDropout(0.4, "exponential", "constant")
    assert constant.rates(3, L, T) == about([0.4 * 0.25992105] * L)
    assert LayerDropout(0.0889, by_layer="constant").rates(0, L, T) == [0.0889] * L


def test_normalised_weights_of_the_rotation() -> None:
    kept = EarlyExitLoss(0.2, "rotational", 3)
    assert kept.weights(0, L, T) == about([0, 0, 0, 3 / 16, 13 / 16])  # {0, 3, 4}: 1.2 and 5.2 of 6.4
    assert kept.weights(1, L, T) == about([0, 1 / 27, 0, 0, 26 / 27])  # {1, 4}: .2 and 5.2 of 5.4
    assert kept.weights(2, L, T) == about([0, 0, 3 / 29, 0, 26 / 29])  # {2, 4}: .6 and 5.2 of 5.8
    assert kept.weights(3, L, T) == kept.weights(0, L, T)
    paper = EarlyExitLoss(0.2, "rotational", 3, keep_last=False)
    assert paper.weights(0, L, T) == about([0, 0, 0, 1, 0])
    assert paper.weights(1, L, T) == about([0, 1 / 27, 0, 0, 26 / 27])
    assert paper.weights(2, L, T) == about([0, 0, 1, 0, 0])


def test_normalised_weights_of_the_other_curricula() -> None:
    every = [0, 1 / 36, 1 / 12, 1 / 6, 13 / 18]  # .2, .6, 1.2 and 5.2 of 7.2
    assert EarlyExitLoss(0.2, "none").weights(7, L, T) == about(every)
    gradually = EarlyExitLoss(0.2, "gradual")
    assert gradually.weights(0, L, T) == [0, 0, 0, 0, 1]
    assert gradually.weights(1, L, T) == about([0, 0, 0, 3 / 16, 13 / 16])
    assert gradually.weights(2, L, T) == about([0, 0, 3 / 35, 6 / 35, 26 / 35])
    assert gradually.weights(4, L, T) == about(every)


def test_without_a_dilation_the_rotation_has_one_layer_less_than_the_model() -> None:
    exits = EarlyExitLoss(0.2, "rotational", None)
    assert [layers_of(exits.active(step, L, T)) for step in range(5)] == [[0, 4], [1, 4], [2, 4], [3, 4], [0, 4]]
    assert exits.active(1, 2, T) == [True, True]


def test_the_older_key_counts_layers_from_0_and_says_how_to_write_it() -> None:
    """Exit l of the paper is decoding's E = l + 1."""
    with pytest.warns(FutureWarning, match=r"exit_layers: \[2, 4\]"):
        older = EarlyExitLoss(0.2, "none", exits=(1, 3))
    assert older == EarlyExitLoss(0.2, "none", exit_layers=(2, 4))
    assert layers_of(older.active(0, 8, T)) == [1, 3, 7]
    assert older.trained(8) == [2, 4]
    assert EarlyExitLoss(0.2, "none").trained(4) == [2, 3], "e(0) = 0, and the last layer is no early exit"
    assert EarlyExitLoss(kl_weight=1).trained(4) == [1, 2, 3]
    assert EarlyExitLoss(0.0, "none").trained(4) == []


def test_named_exits_are_what_the_curriculum_ranges_over() -> None:
    rotating = EarlyExitLoss(0.2, "rotational", 2, exit_layers=(6, 2, 4, 2))
    assert [layers_of(rotating.active(step, 8, T)) for step in range(3)] == [[1, 5, 7], [3, 7], [1, 5, 7]]
    whole = EarlyExitLoss(0.2, "rotational", None, exit_layers=(2, 3, 4))  # R = 2
    assert [layers_of(whole.active(step, 8, T)) for step in range(3)] == [[1, 3, 7], [2, 7], [1, 3, 7]]
    assert [layers_of(EarlyExitLoss(0.2, "gradual", exit_layers=(2, 3)).active(step, 8, 8)) for step in (0, 1, 2)] == [
        [2, 7],
        [2, 7],
        [1, 2, 7],
    ]
    assert layers_of(EarlyExitLoss(0.2, "none", exit_layers=(1, 3), keep_last=False).active(0, 8, T)) == [0, 2]


@given(layers=st.integers(2, 40), steps=st.integers(2, 200), data=st.data())
@settings(max_examples=60, deadline=None)
def test_weights_sum_to_one_and_the_last_layer_weighs_most(layers: int, steps: int, data: st.DataObject) -> None:
    curriculum = data.draw(st.sampled_from(["rotational", "gradual", "none"]))
    exits = EarlyExitLoss(data.draw(st.floats(0, 1)), curriculum, data.draw(st.none() | st.integers(1, layers)))
    LayerSkipRecipe(LayerDropout(), exits).check(layers, steps)
    step = data.draw(st.integers(0, steps - 1))
    weights, active = exits.weights(step, layers, steps), exits.active(step, layers, steps)
    assert math.fsum(weights) == pytest.approx(1, abs=1e-12)
    assert weights[-1] == max(weights) > 0 == weights[0]
    assert all(on or not weight for on, weight in zip(active, weights, strict=True))
    trained = [weight for weight, on in zip(weights, active, strict=True) if on]
    assert trained == sorted(trained)


def test_the_presets_carry_the_papers_settings() -> None:
    """Tables 8, 9 and 10: learning rate with and without layer dropout, sequences per GPU, GPUs, context, steps. Their derived
    batches and the contexts give section 5's numbers of tokens; code's need a context of 4096, and table 10 has 2048."""
    rows = {
        "continual": (3e-5, 3e-5, 4, 64, 4096, 50_000, 256, 52e9),
        "continual-13b": (2e-5, 2e-5, 4, 64, 4096, 50_000, 256, 52e9),
        "continual-llama3": (3e-5, 3e-5, 4, None, 4096, 50_000, None, None),
        "scratch": (8e-4, 4e-4, 4, 32, 4096, 50_000, 128, 26e9),
        "scratch-7b": (8e-4, 3e-4, 4, 32, 4096, 50_000, 128, 26e9),
        "code": (1e-4, 1e-4, 4, 32, 2048, 10_000, 128, 5.2e9 / 2),
        "task": (1e-4, 1e-4, 32, 8, 4096, 5_800, 256, None),
    }
    assert PRESETS.keys() == rows.keys()
    for name, (rate, undropped, *run, batch, tokens) in rows.items():
        found = PRESETS[name]
        assert (found.rate(found.dropout), found.rate(LayerDropout(0))) == (rate, undropped)
        assert [found.batch_size, found.gpus, found.context, found.steps] == run
        assert found.derived_batch_size == batch
        assert tokens is None or (batch or 0) * found.context * found.steps == pytest.approx(tokens, rel=0.01)


# preset -> L of the model, a step t, p_{l,t} of layer L / 2 and of the last layer, layer -> e(l) of the exits that train in it,
# by hand: D(16) = 2^(16/31) - 1, D(12) = 2^(12/23) - 1, S(25000) = 2^(25000/49999) - 1, e(l) = e_scale l (l + 1) / 2, and
# e(L - 1) = L - 1 + e_scale (L - 2) (L - 1) / 2. Rotational: l = t mod R, and L - 1. Gradual: 1 + 2 L t / T layers.
TRACES: dict[str, tuple[int, int, float, float, dict[int, float]]] = {
    "continual": (32, 3, 0.04301, 0.1, {3: 1.2, 11: 13.2, 19: 38, 27: 75.6, 31: 124}),
    "continual-13b": (40, 44, 0.04268, 0.1, {5: 1.5, 39: 113.1}),
    "continual-llama3": (32, 3, 0.04301, 0.1, {3: 0.6, 11: 6.6, 19: 19, 27: 37.8, 31: 77.5}),
    "scratch": (24, 25_000, 0.01805, 0.04142, {22: 50.6, 23: 73.6}),
    "scratch-7b": (32, 25_000, 0.03563, 0.08284, {14: 21, 31: 124}),
    "code": (32, 3, 0.04301, 0.1, {3: 6, 19: 190, 31: 496}),
    "task": (24, 1_933, 0.08714, 0.2, {**{layer: layer * (layer + 1) / 2 for layer in range(8, 23)}, 23: 276}),  # 16 layers
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_of_every_preset_by_hand(name: str) -> None:
    preset, (layers, step, middle, last, scales) = PRESETS[name], TRACES[name]
    preset.check(layers, preset.steps)
    rates = preset.dropout.rates(step, layers, preset.steps)
    assert (rates[0], rates[layers // 2], rates[-1]) == pytest.approx((0, middle, last), abs=1e-5)
    weights = preset.exits.weights(step, layers, preset.steps)
    total = sum(scales.values())
    assert weights == about([scales.get(layer, 0) / total for layer in range(layers)])


@pytest.mark.parametrize(
    ("settings", "field", "values"),
    [
        (LayerDropout, "p_max", (-0.01, 1.01, NAN, math.inf, True, "0.1", None)),
        (LayerDropout, "curriculum", ("linear", None)),
        (EarlyExitLoss, "e_scale", (-0.01, 1.01, NAN, math.inf, False, "1e-1")),
        (EarlyExitLoss, "curriculum", ("rotate", None)),
        (EarlyExitLoss, "dilation", (0, -1, 2.5, 8.0, NAN, True, "8")),
        (EarlyExitLoss, "kl_weight", (0, -1.0, NAN, math.inf, True, "1.5")),
        (EarlyExitLoss, "keep_last", (0, "no", None)),
        (EarlyExitLoss, "exit_layers", ((), [1, 2], 3, (1, -1), (1, 0), (1.0,), (True,), ("1",), (NAN,))),
    ],
)
def test_an_impossible_value_is_refused_when_it_is_set(settings: Any, field: str, values: tuple[Any, ...]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=field):
            settings(**{field: value})


def test_formulas_that_would_divide_by_0_and_both_numberings_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 2 layers, found 1"):
        dropout_by_layer(0, 1)
    with pytest.raises(ValueError, match="at least 2 steps, found 1"):
        dropout_by_step(0, 1)
    with pytest.raises(ValueError, match="found both"):
        EarlyExitLoss(exits=(1,), exit_layers=(2,))


WEIGHTLESS = EarlyExitLoss(0, "rotational", 3, keep_last=False)  # {0, 3} first, then {1}
CHECKED: dict[str, tuple[LayerDropout, EarlyExitLoss, tuple[int, int], str]] = {
    "L = 1": (LayerDropout(0), EarlyExitLoss(0.2, "none"), (1, 9), "at least 2 layers, found 1"),
    "T = 1": (LayerDropout(0.1, "exponential"), EarlyExitLoss(0.2, "none"), (4, 1), "at least 2 steps, found 1"),
    "R > exits": (LayerDropout(), EarlyExitLoss(0.2, "rotational", 3, exit_layers=(2, 3)), (4, 9), "the 2 exits, found 3"),
    "no scale at a later step": (LayerDropout(), WEIGHTLESS, (4, 9), r"exits E = \[2\] have no weight"),
    "{0} at step 0": (LayerDropout(), replace(WEIGHTLESS, e_scale=0.2, dilation=4), (4, 9), r"exits E = \[1\] have no weight"),
    "exits beyond": (LayerDropout(), EarlyExitLoss(0.2, "none", exit_layers=(2, 5)), (4, 9), r"between 1 and 4, found \[5\]"),
    "exits without weight": (LayerDropout(), EarlyExitLoss(0.2, "none", exit_layers=(1,)), (4, 9), "nothing but the last"),
    "only the last, KL": (LayerDropout(), EarlyExitLoss(kl_weight=1, dilation=1, exit_layers=(4,)), (4, 9), "but the last"),
    "KL without the last": (LayerDropout(), EarlyExitLoss(kl_weight=1, keep_last=False), (8, 9), "keep_last=True"),
}


@pytest.mark.parametrize("case", CHECKED)
def test_a_recipe_that_does_not_fit_the_model_or_the_run_is_refused_before_it(case: str) -> None:
    dropout, exits, (layers, steps), words = CHECKED[case]
    with pytest.raises(ValueError, match=words):
        LayerSkipRecipe(dropout, exits).check(layers, steps)


def test_what_is_possible_is_accepted() -> None:
    for dropout, exits, layers, steps in (
        (LayerDropout(0), EarlyExitLoss(0, "none"), 2, 1),  # layer dropout off, early exits off
        (LayerDropout(1, "exponential"), EarlyExitLoss(1, "rotational", 1), 2, 2),
        (LayerDropout(), EarlyExitLoss(0.2, "rotational", 3, keep_last=False), 4, 9),  # {0, 3}, {1}, {2}
        (LayerDropout(), EarlyExitLoss(0, "none", kl_weight=2, exit_layers=(1,)), 4, 9),  # KL gives layer 0 a weight
    ):
        LayerSkipRecipe(dropout, exits).check(layers, steps)
