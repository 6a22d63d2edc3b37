"""Products with bfloat16 inputs in the native engine: two fused multiply-adds for a pair of inputs"""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from skipstone.engines.native.weights import ROUNDED, TYPES
from tests.helpers.native import NATIVE_ONLY
from tests.helpers.quantized import Packed, inputs_of, libraries

pytestmark = NATIVE_ONLY
BFLOAT16 = TYPES[torch.bfloat16]
SMALLEST = np.float32(2.0**-126)
"""The smallest number that is not denormal."""


def nearest_bfloat16(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 numbers."""
    return torch.from_numpy(values).bfloat16().float().numpy()


def bits_of(values: np.ndarray) -> np.ndarray:
    """bfloat16 numbers as they are stored."""
    return torch.from_numpy(values).bfloat16().view(torch.int16).numpy()


class PackedPairs(Packed):
    """bfloat16 weights in panels, as the LM head of a model without layers. kind: of the products."""

    def __init__(self, engine: Any, weights: np.ndarray, kind: int = ROUNDED) -> None:
        super().__init__(engine, kind, bits_of(weights), BFLOAT16)


def product(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[n, o] float32: pairs of inputs, the second one of a pair first. Denormal numbers and sums are 0.

    The product of two bfloat16 numbers is exact in float32. Its sum with a float32 number is exact in 64 bits, if their sizes
    are not very different."""
    flushed = lambda values: np.where(np.abs(values) < SMALLEST, values * 0, values)  # noqa: E731
    x, weights = flushed(nearest_bfloat16(x)).astype(np.longdouble), flushed(weights).astype(np.longdouble)
    sums = np.zeros((len(x), len(weights)), dtype=np.float32)
    for first in range(0, x.shape[1], 2):
        for k in (first + 1, first):
            if k < x.shape[1]:
                sums = flushed((sums + x[:, k, None] * weights[None, :, k]).astype(np.float32))
    return sums


def random_weights(outputs: int, inputs: int) -> np.ndarray:
    dice = np.random.default_rng(outputs)
    return nearest_bfloat16(
        (dice.normal(size=(outputs, inputs)) * np.exp(2 * dice.normal(size=(outputs, 1)))).astype(np.float32)
    )


@pytest.mark.parametrize(("outputs", "inputs"), [(16, 64), (97, 130), (33, 257), (5, 1)])
def test_products_are_fused_multiply_adds_of_rounded_inputs(outputs: int, inputs: int) -> None:
    weights, x = random_weights(outputs, inputs), inputs_of(9, inputs)
    expected = product(x, weights)
    for engine in libraries():
        packed = PackedPairs(engine, weights)
        assert np.array_equal(packed.rows(), weights)
        assert np.array_equal(packed.multiplied(x), expected)
        other_order = x[:, [1, 0, *range(2, inputs)]] if inputs > 1 else 2 * x
        assert not np.array_equal(packed.multiplied(other_order), expected)
        if inputs > 1:
            assert not np.array_equal(PackedPairs(engine, weights, BFLOAT16).multiplied(x), expected), "nothing was rounded"


def test_denormal_numbers_count_as_zero_and_only_in_these_products() -> None:
    tiny, half = float(SMALLEST), float(SMALLEST) / 2
    x = np.array([[half, 0], [1, 0], [tiny, 0], [tiny, -tiny * (1 + 2**-7)], [1, 1]], dtype=np.float32)
    weights = np.array([[1, 0], [half, 0], [0.5, 0], [1, 1], [3 * tiny, -2.5 * tiny]], dtype=np.float32)
    expected = product(x, weights)
    assert (expected == 0).sum() > 10
    assert expected[2, 0] == SMALLEST
    for engine in libraries():
        packed = PackedPairs(engine, weights)
        assert np.array_equal(packed.multiplied(x), expected)
        assert np.array_equal(packed.multiplied(x, 3), expected)
        assert PackedPairs(engine, weights, BFLOAT16).multiplied(x)[0, 0] == half, "denormal numbers stay on in other products"


def test_the_same_bits_on_every_level_beside_any_rows() -> None:
    weights, x = random_weights(210, 514), inputs_of(40, 514)
    first = PackedPairs(libraries()[0], weights)
    expected = np.concatenate([first.multiplied(x[i : i + 1]) for i in range(len(x))])
    for engine in libraries():
        packed, ids = PackedPairs(engine, weights), np.array([3, 17, 209])
        for count in range(1, 41):
            assert np.array_equal(packed.multiplied(x[:count], 1 + count % 3), expected[:count])
        taken = PackedPairs(engine, weights[ids])
        taken.panels[:] = 0
        engine.sk_take(ctypes.addressof(packed.model.head), ids.ctypes.data, 3, taken.panels.ctypes.data)
        assert np.array_equal(taken.multiplied(x), expected[:, ids])
