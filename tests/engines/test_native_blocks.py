"""GGUF's blocks in the native engine: the weights of the `gguf` package, products in float64, the same bits everywhere."""

import ctypes
from itertools import product as product_of
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skipstone.engines.native.weights import BLOCKS, QUANTIZED
from tests.helpers.ggml_blocks import random_blocks, weights_of
from tests.helpers.native import NATIVE_ONLY
from tests.helpers.quantized import GROUP, Packed, assert_near, grouped, inputs_of, libraries

pytestmark = NATIVE_ONLY
KINDS = list(BLOCKS)
SHAPES = [(16, 256), (97, 512), (33, 768), (5, 256)]  # outputs, inputs


class PackedBlocks(Packed):
    """Blocks in panels, as the LM head of a model without layers."""

    def __init__(self, engine: Any, kind: str, blocks: np.ndarray, inputs: int) -> None:
        super().__init__(engine, BLOCKS[kind], blocks, BLOCKS[kind], inputs)


def product(x: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """[n, o] float64, with inputs rounded to 8 bits by group of 32."""
    groups = grouped(x)
    top = np.abs(groups).max(2, keepdims=True)
    inverse = np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    rounded = np.rint(groups * inverse) * (top / np.float32(127)).astype(np.float64)
    return rounded.reshape(len(x), -1) @ weights.T.astype(np.float64)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_and_products_are_those_of_the_file(kind: str) -> None:
    for (outputs, inputs), engine in product_of(SHAPES, libraries()):
        blocks, x = random_blocks(kind, outputs, inputs), inputs_of(9, inputs)
        packed, weights = PackedBlocks(engine, kind, blocks, inputs), weights_of(kind, blocks)
        assert np.array_equal(packed.rows(), weights)
        assert_near(packed.multiplied(x), product(x, weights))
        wrong = weights.reshape(outputs, -1, GROUP // 2).copy()
        wrong[:, [0, 1]] = wrong[:, [1, 0]]
        with pytest.raises(AssertionError):
            assert_near(packed.multiplied(x), product(x, wrong.reshape(outputs, -1)))


@pytest.mark.parametrize("kind", KINDS)
def test_sums_of_the_largest_codes_and_inputs_do_not_overflow(kind: str) -> None:
    blocks, signs = random_blocks(kind, 16, 512), np.where(np.arange(512) % 2, np.float32(1), np.float32(-1))
    block_size = blocks.size * (256 if kind.endswith("K") else GROUP) // (16 * 512)
    places = {"Q4_1": slice(4, None), "Q4_K": slice(16, None), "Q5_K": slice(16, None), "Q6_K": slice(0, 192)}  # of the codes
    blocks.reshape(-1, block_size)[:, places.get(kind, slice(2, None))] = 127 if kind == "Q8_0" else 255
    x = np.stack([np.abs(signs), -np.abs(signs), signs])
    for engine in libraries():
        assert_near(PackedBlocks(engine, kind, blocks, 512).multiplied(x), product(x, weights_of(kind, blocks)))


@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_same_bits_on_every_level_beside_any_rows(kind: str) -> None:
    blocks, x = random_blocks(kind, 210, 512), inputs_of(40, 512)
    first = PackedBlocks(libraries()[0], kind, blocks, 512)
    expected = np.concatenate([first.multiplied(x[i : i + 1]) for i in range(len(x))])
    for engine in libraries():
        packed = PackedBlocks(engine, kind, blocks, 512)
        assert np.array_equal(packed.panels, first.panels)
        for count in range(1, 41):
            assert np.array_equal(packed.multiplied(x[:count], 1 + count % 3), expected[:count])


@pytest.mark.parametrize("kind", KINDS)
def test_panels_keep_the_size_of_the_file_and_can_be_packed_from_it_in_pieces(kind: str, tmp_path: Path) -> None:
    blocks, path = random_blocks(kind, 48, 1024), tmp_path / "weights"
    path.write_bytes(b"header" + blocks.tobytes())
    number, engine = BLOCKS[kind], libraries()[0]
    expected = PackedBlocks(engine, kind, blocks, 1024).panels
    assert len(expected) <= 1.01 * blocks.nbytes
    with path.open("rb") as file:
        panels = np.zeros_like(expected)
        for begin, count in ((0, 16), (16, 32)):
            to = panels.ctypes.data + engine.sk_packed_bytes(number, begin, 1024)
            engine.sk_pack(number, number, file.fileno(), 6 + begin * blocks.shape[1], 0, count, 1024, to, 2)
        assert np.array_equal(panels, expected)
        with pytest.raises(OSError, match="changed while it was loaded"):
            engine.sk_pack(number, number, file.fileno(), 6 + blocks.shape[1], 0, 48, 1024, panels.ctypes.data, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_copies_of_fewer_bits_and_of_some_rows_are_those_of_the_weights(kind: str) -> None:
    blocks, x = random_blocks(kind, 37, 512), inputs_of(3, 512)
    for engine, copy in product_of(libraries(), QUANTIZED):
        expected = Packed(engine, QUANTIZED[copy], weights_of(kind, blocks)).panels
        panels = np.full_like(expected, 85)
        engine.sk_quantize(QUANTIZED[copy], BLOCKS[kind], -1, blocks.ctypes.data, 0, 37, 512, panels.ctypes.data, 2)
        assert np.array_equal(panels, expected)
    for engine in libraries():
        packed, ids = PackedBlocks(engine, kind, blocks, 512), np.array([3, 17, 36])
        whole, rows = packed.multiplied(x), PackedBlocks(engine, kind, blocks[ids], 512)
        taken = np.zeros_like(rows.panels)
        engine.sk_take(ctypes.addressof(packed.model.head), ids.ctypes.data, 3, taken.ctypes.data)
        assert np.array_equal(taken, rows.panels)
        assert np.array_equal(rows.multiplied(x), whole[:, ids])


def test_codes_and_sizes_that_panels_do_not_have_are_refused() -> None:
    blocks, number = random_blocks("Q8_0", 33, 64), BLOCKS["Q8_0"]
    for engine in libraries():
        for output, place in ((0, 2), (32, 67)):
            wrong, panels = blocks.copy(), np.empty(engine.sk_packed_bytes(number, 33, 64), dtype=np.uint8)
            wrong[output, place] = 128  # -128
            with pytest.raises(ValueError, match="finite"):
                engine.sk_pack(number, number, -1, wrong.ctypes.data, 0, 33, 64, panels.ctypes.data, 2)
        for kind in ("Q4_K", "Q5_K", "Q6_K"):
            assert engine.sk_packed_bytes(BLOCKS[kind], 16, 128) == -1
