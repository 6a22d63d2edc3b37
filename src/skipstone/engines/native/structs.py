"""The structs of the C ABI (csrc/model.h), field by field."""

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import Any

ROTARY_TABLES = 4  # most rotary tables of a model
SKIP_ATTENTION, SKIP_MLP = 1, 2  # bits of a layer's entry in a skip set


class MatrixStruct(ctypes.Structure):
    """A weight matrix in panels. bias: float32 [outputs]. type: see `weights.TYPES`."""

    _fields_ = [(name, c_void_p) for name in ("panels", "bias")] + [(name, c_int64) for name in ("outputs", "inputs", "type")]


class LayerStruct(ctypes.Structure):
    """One decoder layer; pointers are null for what it does not have."""

    _fields_ = (
        [(name, MatrixStruct) for name in ("q", "k", "v", "o", "gate", "up", "down")]
        + [
            (name, c_void_p)
            for name in (
                "norm_before_attention",
                "norm_after_attention",
                "norm_before_mlp",
                "norm_after_mlp",
                "norm_q",
                "norm_k",
            )
        ]
        + [(name, c_int64) for name in ("norm_whole", "window", "rotary", "activation")]
        + [(name, c_float) for name in ("scale", "softcap", "residual", "padding")]
    )


class ModelStruct(ctypes.Structure):
    """The sizes of a model, its layers, and what surrounds them."""

    _fields_ = (
        [
            (name, c_int64)
            for name in ("hidden", "heads", "kv_heads", "head_size", "intermediate", "depth", "vocabulary", "embeddings")
        ]
        + [
            ("layers", c_void_p),
            ("head", MatrixStruct),
            ("embedding", c_void_p),
            ("embedding_type", c_int64),
            ("norm", c_void_p),
        ]
        + [
            (name, c_float)
            for name in ("epsilon", "embedding_scale", "embedding_multiplier", "logits_divisor", "logits_softcap")
        ]
    )


class ShortlistStruct(ctypes.Structure):
    """Some rows of the LM head, and the ids that they stand for, int64 [head.outputs], ascending."""

    _fields_ = [("head", MatrixStruct), ("ids", c_void_p)]


class StoreStruct(ctypes.Structure):
    """Where the keys and values of all layers are: arrays of pointers, one a layer."""

    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("rows", c_int64), ("slots", c_int64), ("type", c_int64)]


class RotaryStruct(ctypes.Structure):
    """cos and sin [positions, size]."""

    _fields_ = [("cos", c_void_p), ("sin", c_void_p), ("positions", c_int64), ("size", c_int64)]


class PassStruct(ctypes.Structure):
    """Which tokens take part in a pass; strides count elements."""

    _fields_ = [
        ("b", c_int64),
        ("n", c_int64),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("positions_stride", c_int64),
        ("slots_stride", c_int64),
        ("valid", c_void_p),
        ("valid_stride", c_int64),
        ("first_row", c_int64),
        ("extent", c_int64),
        ("base", c_void_p),
        ("ancestors", c_void_p),
        ("ancestors_row", c_int64),
        ("ancestors_column", c_int64),
        ("columns", c_int64),
        ("column_positions", c_void_p),
        ("column_positions_stride", c_int64),
        ("seen", c_void_p),
        ("rotary", RotaryStruct * ROTARY_TABLES),
    ]


BAD_LAYER, BAD_WEIGHT = 4, 8  # errors: of a layer that is not there, of weights that cannot be quantised
ERRORS = {
    1: "a slot that the KV store does not have, or one slot for two tokens",
    2: "a position that the model does not have",
    3: "a token id that the model has no embedding for",
    4: "a layer that the model does not have",
    5: "a tree in which a token sees nothing, or that lies outside the store",
    6: "more memory or threads than there are",
    7: "a number of threads that is not from 1 to 64",
    8: "weights that cannot be quantised: one is not finite, or too large",
    9: "something with a buffer that is missing, or a size that is negative or does not fit the others",
}
"""What the error codes of the C ABI say was asked for."""


class NativeError(RuntimeError):
    """An error code of the C ABI."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the native engine was asked for {ERRORS[code]}")
        self.code = code


def check(code: int, *_: Any) -> int:
    """NativeError for an error code. ctypes calls this with what every function returns that may fail."""
    if code:
        raise NativeError(code)
    return code


def declare(library: Any) -> Any:
    """Tell ctypes the arguments of every function, and to raise NativeError for error codes. ValueError where the structs of
    library and Python differ in size."""
    pointer, whole = c_void_p, c_int64
    declared = {
        "sk_pack": [whole, pointer, whole, whole, whole, pointer],
        "sk_quantize": [whole, whole, pointer, whole, whole, whole, pointer],
        "sk_take": [pointer, pointer, whole, pointer],
        "sk_embed": [pointer, pointer, whole, pointer],
        "sk_run": [pointer] * 3 + [whole] * 2 + [pointer] * 2 + [whole, pointer, whole, whole],
        "sk_norm": [pointer, pointer, whole, pointer],
        "sk_head": [pointer] * 3 + [whole] * 2 + [pointer] * 2 + [whole],
        "sk_test": [pointer] * 3 + [whole] + [pointer] * 3 + [whole],
        "sk_largest": [pointer] + [whole] * 4 + [pointer, whole],
        "sk_draw": [pointer] + [whole] * 3 + [pointer] * 5 + [whole, pointer],
        "sk_chain": (
            [pointer] * 3
            + [whole] * 2
            + [pointer] * 4
            + [whole]
            + [pointer] * 2
            + [whole] * 2
            + [pointer] * 2
            + [whole]
            + [pointer] * 5
            + [whole] * 2
        ),
    }
    for name, arguments in declared.items():
        function = getattr(library, name)
        function.restype, function.argtypes, function.errcheck = whole, arguments, check
    library.sk_packed_bytes.restype, library.sk_packed_bytes.argtypes = whole, [whole] * 3
    library.sk_sizes.restype, library.sk_sizes.argtypes = None, [pointer]
    sizes = (c_int64 * 6)()
    library.sk_sizes(ctypes.addressof(sizes))
    own = [ctypes.sizeof(kind) for kind in (MatrixStruct, LayerStruct, ModelStruct, StoreStruct, PassStruct, ShortlistStruct)]
    if list(sizes) != own:
        raise ValueError(f"the native library's structs have {list(sizes)} bytes, expected {own}")
    return library
