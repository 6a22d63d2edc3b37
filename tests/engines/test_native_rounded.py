"""Products with bfloat16 inputs in the native engine: two fused multiply-adds for a pair of inputs"""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from skipstone.engines.native.weights import BFLOAT16_INPUTS, TYPES
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

    def __init__(self, engine: Any, weights: np.ndarray, kind: int = BFLOAT16_INPUTS) -> None:
        super().__init__(engine, kind, bits_of(weights), BFLOAT16)


def product(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[n, o] float32: pairs of inputs, the second one of a pair first. Denormal numbers and sums are 0.

    The product of two bfloat16 numbers is exact in float32. Its sum with a float32 number is exact in 64 bits, if their sizes
    are not very different. A sum is denormal if it is too small after it was rounded to 24 bits. All sums are larger by 2^64
    here, so that none is rounded to fewer bits."""
    flushed = lambda values, smallest: np.where(np.abs(values) < smallest, values * 0, values)  # noqa: E731
    large = np.float32(2.0**64)
    x, weights = (flushed(values, SMALLEST).astype(np.longdouble) for values in (nearest_bfloat16(x), weights))
    sums = np.zeros((len(x), len(weights)), dtype=np.float32)
    for first in range(0, x.shape[1], 2):
        for k in (first + 1, first):
            if k < x.shape[1]:
                exact_sums = sums + x[:, k, None] * weights[None, :, k] * np.longdouble(large)
                sums = flushed(exact_sums.astype(np.float32), SMALLEST * large)
    return sums / large


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


def test_denormal_numbers_count_as_zero() -> None:
    tiny, half = float(SMALLEST), float(SMALLEST) / 2
    x = [[half, 0], [1, 0], [tiny, 0], [tiny, -tiny * (1 + 2**-7)], [1, 1], [2**-76, 2**-63], [1.25 * 2**-76, 2**-63]]
    weights = [[1, 0], [half, 0], [0.5, 0], [1, 1], [3 * tiny, -2.5 * tiny], [-(2**-76), 2**-63], [-(2**-75), 2**-63]]
    x, weights = np.array(x, dtype=np.float32), np.array(weights, dtype=np.float32)
    expected = product(x, weights)
    assert (expected == 0).sum() > 10
    assert expected[2, 0] == SMALLEST
    assert expected[5, 5] == SMALLEST, "2^-126 - 2^-152 is rounded to a number that is not denormal"
    assert expected[6, 6] == 0, "2^-126 - 1.25 2^-151 is not, but would be if denormal numbers were rounded like others"
    for engine in libraries():
        packed = PackedPairs(engine, weights)
        for threads in (1, 3):
            assert np.array_equal(packed.multiplied(x, threads), expected)


def test_denormal_numbers_count_after_and_in_other_products() -> None:
    outputs = 48  # three panels, one for each thread
    x, denormals = np.ones((2, 2), dtype=np.float32), np.full(outputs, 2.0**-130, dtype=np.float32)
    weights = np.tile(denormals[:, None], 2)
    for engine in libraries():
        packed, other = PackedPairs(engine, weights), PackedPairs(engine, weights, BFLOAT16)
        packed.model.head.bias = denormals.ctypes.data
        for threads in (1, 3):
            assert (packed.multiplied(x, threads) == denormals).all(), "0 and the bias"
            assert (other.multiplied(x, threads) == 2 * denormals).all()


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
