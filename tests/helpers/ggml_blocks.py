"""Random blocks of GGUF's types, and the weights that they stand for by the `gguf` package."""

import gguf
import numpy as np

SCALES = {"Q4_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Places of the float16 numbers in a block; other types have one, at its beginning."""


def random_blocks(kind: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """[outputs, bytes of a row] uint8: any codes, and scales of very different sizes, one of them negative and one 0."""
    dice, (length, size) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = dice.integers(0, 256, (outputs * inputs // length, size), dtype=np.uint8)
    if kind == "Q8_0":
        blocks[:, 2:] = dice.integers(-127, 128, (len(blocks), 32)).astype(np.int8).view(np.uint8)
    for place in SCALES.get(kind, (0,)):
        scales = (0.1 * np.exp(dice.normal(size=len(blocks)))).astype(np.float16)
        scales[:2] = -0.5, 0
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    return blocks.reshape(outputs, -1)


def weights_of(kind: str, blocks: np.ndarray) -> np.ndarray:
    """[outputs, inputs] float32."""
    return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind])
