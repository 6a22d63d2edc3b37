"""Matrices in panels of the native engine, their products, and how tests of quantised weights compare."""

import ctypes
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skipstone.engines.native import build, library
from skipstone.engines.native.structs import MatrixStruct, ModelStruct, declare
from skipstone.engines.native.weights import QUANTIZED
from tests.helpers.native import levels

GROUP = 32  # inputs that share a scale
Found = np.ndarray


def libraries() -> list[Any]:
    found = [library.find(build.HERE, library.features(), name).library for name in levels()]
    return [declare(one) for one in found if one is not None]


def drawn(outputs: int, inputs: int, seed: int = 0) -> Found:
    """Weights of very different sizes, some groups 0 and some of one sign."""
    dice = np.random.default_rng(seed)
    weights = dice.normal(size=(outputs, inputs)) * np.exp(dice.normal(size=(outputs, 1)))
    weights[:, : GROUP // 2] += 3 * (dice.random((outputs, 1)) < 0.3)
    weights[dice.random(outputs) < 0.1] = 0
    return weights.astype(np.float32)


def grouped(values: Found) -> Found:
    """[n, inputs] -> [n, groups, 32], padded with zeros."""
    rows, inputs = values.shape
    padded = np.zeros((rows, -(-inputs // GROUP) * GROUP), dtype=values.dtype)
    padded[:, :inputs] = values
    return padded.reshape(rows, -1, GROUP)


class Packed:
    """Weights in panels, as the LM head of a model without layers."""

    def __init__(self, engine: Any, kind: str, weights: Found) -> None:
        self.engine, (outputs, inputs), number = engine, weights.shape, QUANTIZED[kind]
        self.outputs, self.inputs = outputs, inputs
        self.panels = np.zeros(engine.sk_packed_bytes(number, outputs, inputs), dtype=np.uint8)
        assert engine.sk_quantize(number, 0, -1, weights.ctypes.data, inputs, outputs, inputs, self.panels.ctypes.data, 2) == 0
        head = MatrixStruct(self.panels.ctypes.data, None, outputs, inputs, number)
        self.model = ModelStruct(hidden=inputs, vocabulary=outputs, embeddings=outputs, head=head, logits_divisor=1.0)
        self.model.embedding_scale = self.model.embedding_multiplier = 1.0

    def multiplied(self, x: Found, threads: int = 1) -> Found:
        y = np.full((len(x), self.outputs), np.nan, dtype=np.float32)
        model = ctypes.addressof(self.model)
        self.engine.sk_head(model, None, x.ctypes.data, len(x), 0, y.ctypes.data, None, threads)
        return y

    def rows(self) -> Found:
        ids, rows = np.arange(self.outputs), np.empty((self.outputs, self.inputs), dtype=np.float32)
        model = ctypes.addressof(self.model)
        assert self.engine.sk_embed(model, ids.ctypes.data, self.outputs, rows.ctypes.data) == 0
        return rows


def inputs_of(count: int, width: int, seed: int = 1) -> Found:
    dice = np.random.default_rng(seed)
    x = dice.normal(size=(count, width)) * np.exp(dice.normal(size=(count, 1)))
    x[0, : GROUP // 2] = 0
    return x.astype(np.float32)


def assert_near(found: Found, expected: Found) -> None:
    """Equal but for the rounding of float32 sums."""
    assert np.isfinite(found).all()
    assert expected.std() > 0.1, "the reference is degenerate"
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max(), np.abs(found - expected).max()


def rounded(_: Any, given: tuple[Tensor]) -> Tensor:
    """What a linear layer reads, rounded to 8 bits by row and group of 32."""
    flat = grouped(given[0].flatten(0, -2).numpy())
    step = np.maximum(np.abs(flat).max(2, keepdims=True) / np.float32(127), np.float32(1e-30))
    return torch.from_numpy((np.rint(flat / step) * step).reshape(len(flat), -1)[:, : given[0].shape[-1]]).view(given[0].shape)
