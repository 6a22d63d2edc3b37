"""Matrices in panels of the native engine, their products, and how tests of quantised weights compare."""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipstone.engines.native import build, library
from skipstone.engines.native.structs import MatrixStruct, ModelStruct, declare
from skipstone.engines.native.weights import BLOCKS, QUANTIZED
from tests.helpers.native import levels

GROUP = 32  # inputs that share a scale


def libraries() -> list[Any]:
    found = [library.find(build.HERE, library.features(), name).library for name in levels()]
    return [declare(one) for one in found if one is not None]


def drawn(outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Weights of very different sizes, some groups 0 and some of one sign."""
    dice = np.random.default_rng(seed)
    weights = dice.normal(size=(outputs, inputs)) * np.exp(dice.normal(size=(outputs, 1)))
    weights[:, : GROUP // 2] += 3 * (dice.random((outputs, 1)) < 0.3)
    weights[dice.random(outputs) < 0.1] = 0
    return weights.astype(np.float32)


def grouped(values: np.ndarray) -> np.ndarray:
    """[n, inputs] -> [n, groups, 32], padded with zeros."""
    rows, inputs = values.shape
    padded = np.zeros((rows, -(-inputs // GROUP) * GROUP), dtype=values.dtype)
    padded[:, :inputs] = values
    return padded.reshape(rows, -1, GROUP)


class Packed:
    """A matrix in panels, as the LM head of a model without layers."""

    def __init__(self, engine: Any, kind: int, rows: np.ndarray, stored: int = 0, inputs: int = 0) -> None:
        """kind: of the panels, a number of the C ABI. rows: [outputs, ...] in the type `stored`. inputs: 0: as columns."""
        inputs = inputs or rows.shape[1]
        self.engine, self.outputs, self.inputs = engine, len(rows), inputs
        self.panels = np.full(engine.sk_packed_bytes(kind, self.outputs, inputs), 85, dtype=np.uint8)
        pack = engine.sk_quantize if kind in QUANTIZED.values() and kind != stored else engine.sk_pack
        stride = 0 if stored in BLOCKS.values() else inputs
        size = stride, self.outputs, inputs
        assert pack(kind, stored, -1, rows.ctypes.data, *size, self.panels.ctypes.data, 2) == 0
        head = MatrixStruct(self.panels.ctypes.data, None, self.outputs, inputs, kind)
        self.model = ModelStruct(hidden=inputs, vocabulary=self.outputs, embeddings=self.outputs, head=head, logits_divisor=1.0)
        self.model.embedding_scale = self.model.embedding_multiplier = 1.0

    def multiplied(self, x: np.ndarray, threads: int = 1) -> np.ndarray:
        y = np.full((len(x), self.outputs), np.nan, dtype=np.float32)
        model = ctypes.addressof(self.model)
        self.engine.sk_head(model, None, x.ctypes.data, len(x), 0, y.ctypes.data, None, threads)
        return y

    def rows(self) -> np.ndarray:
        ids, rows = np.arange(self.outputs), np.empty((self.outputs, self.inputs), dtype=np.float32)
        model = ctypes.addressof(self.model)
        assert self.engine.sk_embed(model, ids.ctypes.data, self.outputs, rows.ctypes.data) == 0
        return rows


def inputs_of(count: int, width: int, seed: int = 1) -> np.ndarray:
    dice = np.random.default_rng(seed)
    x = dice.normal(size=(count, width)) * np.exp(dice.normal(size=(count, 1)))
    x[0, : GROUP // 2] = 0
    return x.astype(np.float32)


def assert_near(found: np.ndarray, expected: np.ndarray) -> None:
    """Equal but for the rounding of float32 sums."""
    assert np.isfinite(found).all()
    assert expected.std() > 0.1, "the reference is degenerate"
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max(), np.abs(found - expected).max()


def rounded(_: Any, given: tuple[Tensor]) -> Tensor:
    """What a linear layer reads, rounded to 8 bits by row and group of 32."""
    flat = grouped(given[0].flatten(0, -2).numpy())
    step = np.maximum(np.abs(flat).max(2, keepdims=True) / np.float32(127), np.float32(1e-30))
    return torch.from_numpy((np.rint(flat / step) * step).reshape(len(flat), -1)[:, : given[0].shape[-1]]).view(given[0].shape)
