"""The structs of the C ABI (csrc/model.h), field by field."""

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import Any

ROTARY_TABLES = 4  # maximum number per model
SKIP_ATTENTION, SKIP_MLP = 1, 2  # bits of a layer's entry in a skip set


def _fields(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Fields of a struct that have the same type."""
    return [(name, kind) for name in names]


class MatrixStruct(ctypes.Structure):
    """A weight matrix in panels. bias: float32 [outputs]. type: see `weights.TYPES`."""

    _fields_ = [*_fields(c_void_p, "panels", "bias"), *_fields(c_int64, "outputs", "inputs", "type")]


class LayerStruct(ctypes.Structure):
    """One decoder layer; pointers to missing parts are null."""

    _fields_ = [
        *_fields(MatrixStruct, "q", "k", "v", "o", "gate", "up", "down"),
        *_fields(c_void_p, "norm_before_attention", "norm_after_attention", "norm_before_mlp", "norm_after_mlp"),
        *_fields(c_void_p, "norm_of_embedding", "norm_q", "norm_k"),
        *_fields(c_int64, "norm_whole", "norm_before_residual", "window", "rotary", "activation"),
        *_fields(c_float, "scale", "softcap", "residual", "padding"),
    ]


class ModelStruct(ctypes.Structure):
    """The sizes of a model, its layers, its embeddings and its head."""

    _fields_ = [
        *_fields(c_int64, "hidden", "heads", "kv_heads", "head_size", "intermediate", "depth", "vocabulary", "embeddings"),
        *[("layers", c_void_p), ("head", MatrixStruct), ("embedding", c_void_p), ("embedding_type", c_int64)],
        *[("norm", c_void_p), ("feeds_back_normed", c_int64)],
        *_fields(c_float, "epsilon", "embedding_scale", "embedding_multiplier", "logits_divisor", "logits_softcap"),
    ]


class ShortlistStruct(ctypes.Structure):
    """Some rows of the LM head, and their ids, int64 [head.outputs], ascending."""

    _fields_ = [("head", MatrixStruct), ("ids", c_void_p)]


class StoreStruct(ctypes.Structure):
    """The keys and values of all layers: arrays of pointers, one per layer."""

    _fields_ = [*_fields(c_void_p, "keys", "values"), *_fields(c_int64, "rows", "slots", "type")]


class RotaryStruct(ctypes.Structure):
    """cos and sin [positions, size]."""

    _fields_ = [*_fields(c_void_p, "cos", "sin"), *_fields(c_int64, "positions", "size")]


class PassStruct(ctypes.Structure):
    """The tokens of a pass. X_stride_D: elements from one index of the tensor X to the next one in its dimension D."""

    _fields_ = [
        *_fields(c_int64, "b", "n"),
        *_fields(c_void_p, "positions", "slots"),
        *_fields(c_int64, "positions_stride_0", "slots_stride_0"),
        *[("valid", c_void_p), ("valid_stride_0", c_int64)],
        *_fields(c_int64, "first_row", "extent"),
        *_fields(c_void_p, "base", "ancestors"),
        *_fields(c_int64, "ancestors_stride_0", "ancestors_stride_1", "columns"),
        *[("column_positions", c_void_p), ("column_positions_stride_0", c_int64)],
        *[("seen", c_void_p), ("rotary", RotaryStruct * ROTARY_TABLES)],
    ]


BAD_LAYER, BAD_WEIGHT, BAD_FILE = 4, 8, 10  # error codes: no such layer, weights that cannot be quantised, a file too short
ERRORS = {
    1: "a slot that the KV store does not have, or one slot for two tokens",
    2: "a position that the model does not have",
    3: "a token id that the model has no embedding for",
    4: "a layer that the model does not have",
    5: "a tree in which a token sees nothing, or that lies outside the store",
    6: "more memory or threads than there are",
    7: "a number of threads that is not from 1 to 64",
    9: "something with a buffer that is missing, or a size that is negative or does not fit the others",
}
"""Error codes of the C ABI, and the invalid input that each one reports."""


def check(code: int, *_: Any) -> int:
    """RuntimeError for an error code, ValueError for weights that cannot be quantised, OSError for weights that cannot be read.
    ctypes calls this with the result of every function that may fail."""
    if code == BAD_WEIGHT:
        raise ValueError(
            "quantize needs finite weights, none of them beyond the range of float16 times 127, and Q8_0 codes from -127 to 127"
        )
    if code == BAD_FILE:
        raise OSError("a weight file cannot be read: it changed while it was loaded, or its disk failed. Load it again")
    if code:
        raise RuntimeError(f"the native engine was asked for {ERRORS[code]}")
    return code


SIGNATURES = {
    "sk_pack": "iiipiiipi",
    "sk_quantize": "iiipiiipi",
    "sk_take": "ppip",
    "sk_embed": "ppip",
    "sk_run": "pppiippipii",
    "sk_norm": "ppip",
    "sk_head": "pppiippi",
    "sk_test": "pppipppi",
    "sk_largest": "piiiipi",
    "sk_draw": "piiipppppip",
    "sk_chain": "pppiipppppippiippippiipppppppii",
}
"""Functions that return an error code, and the kinds of their arguments: p for a pointer, i for a 64-bit integer."""


def declare(library: Any) -> Any:
    """Declare the arguments of every function to ctypes, and have error codes raise errors. ValueError if the structs of
    the library and of Python differ in size."""
    kinds = {"p": c_void_p, "i": c_int64}
    for name, signature in SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes, function.errcheck = c_int64, [kinds[kind] for kind in signature], check
    library.sk_packed_bytes.restype, library.sk_packed_bytes.argtypes = c_int64, [c_int64] * 3
    library.sk_sizes.restype, library.sk_sizes.argtypes = None, [c_void_p]
    sizes = (c_int64 * 6)()
    library.sk_sizes(ctypes.addressof(sizes))
    expected = [*map(ctypes.sizeof, (MatrixStruct, LayerStruct, ModelStruct, StoreStruct, PassStruct, ShortlistStruct))]
    if list(sizes) != expected:
        raise ValueError(f"the native library's structs have {list(sizes)} bytes, expected {expected}")
    return library
