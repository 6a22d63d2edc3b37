"""The part of OpenVINO that the benchmark's worker uses. A "model" is openvino_model.xml with JSON in it: the vocabulary, the
element types of its constants and, for openvino_genai, the rule of its text (see llama_cpp).
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

USUAL = {"vocabulary": 97, "constants": {"f32": [97, 8], "i64": [3]}, "wrong": 1000, "own_eos": 96, "ends_at": None}


def read_settings(file: Path) -> Any:
    return SimpleNamespace(**USUAL | json.loads(file.read_text()))


class Tensor:
    def __init__(self, values: Any) -> None:
        assert values.dtype == np.int64
        self.values = values


class _Constant:
    def __init__(self, kind: str, shape: list[int]) -> None:
        self._kind, self._shape = kind, shape

    def get_type_name(self) -> str:
        return "Constant"

    def get_output_element_type(self, output: int) -> Any:
        return SimpleNamespace(get_type_name=lambda: self._kind)

    def get_output_shape(self, output: int) -> list[int]:
        return self._shape


class Core:
    def read_model(self, path: str) -> Any:
        settings = read_settings(Path(path))
        constants = [_Constant(*constant) for constant in settings.constants.items()]
        others = [SimpleNamespace(get_type_name=lambda: "MatMul")]
        vocabulary = SimpleNamespace(get_length=lambda: settings.vocabulary)
        output = SimpleNamespace(partial_shape=[None, None, vocabulary])
        return SimpleNamespace(outputs=[output], get_ordered_ops=lambda: [*others, *constants])
