"""Writes GGUF files of a target and of its draft, tokenizer included."""

from pathlib import Path
from typing import Any

import numpy as np
import torch

from skipstone.engines.model_runner import ModelRunner
from skipstone.export.draft import DraftLayers, cut
from skipstone.export.gguf.architecture import expect_architecture, tensors, write_hyperparameters
from skipstone.export.gguf.vocabulary import Vocabulary
from skipstone.utils.extras import installed
from skipstone.utils.files import hidden_folder, publish

TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Types that matrices may be stored in. Vectors stay float32."""
LARGEST_F16 = 65504.0  # the largest number of float16
TARGET, DRAFT = "target.gguf", "draft.gguf"


def stored_type(model: Any, requested: str | None) -> str:
    """The type that a model's matrices are stored in. requested: None for the model's own. ValueError for a type that is not in
    TYPES."""
    kind = requested or TYPES.get(model.dtype, "")
    if kind not in TYPES.values():
        raise ValueError(f"weights are stored as {', '.join(TYPES.values())}, found {requested or model.dtype}")
    return kind


def write_pair(model: ModelRunner, vocabulary: Vocabulary, kept: DraftLayers, folder: Path, kind: str, name: str) -> None:
    """Write a model and the draft of its kept layers as TARGET and DRAFT in a folder, whole or not at all.

    kind: one of the values of TYPES. name: the model's. FileExistsError if the folder exists. ValueError for a model that
    llama.cpp does not compute as transformers does, or that cannot be cut (`draft.cut`).
    """
    if folder.exists():
        raise FileExistsError(17, "there already, and an export overwrites nothing", str(folder))
    draft = cut(model, kept.layers)
    with hidden_folder(folder) as hidden:
        write_model(hidden / TARGET, model.model, vocabulary, kind, name)
        write_model(hidden / DRAFT, draft, vocabulary, kind, f"{name} draft")
        publish(hidden, folder)


def write_model(path: Path, model: Any, vocabulary: Vocabulary, kind: str, title: str) -> None:
    """Write a transformers model as a GGUF file, one weight after the other; `write_pair` has the arguments. An error leaves a
    part of a file."""
    gguf = installed("gguf", "GGUF files need gguf", "export")
    expect_architecture(model.config)
    writer = gguf.GGUFWriter(path, model.config.model_type)
    try:
        writer.add_type("model")
        writer.add_name(title)
        writer.add_file_type(gguf.LlamaFileType["ALL_F32" if kind == "F32" else f"MOSTLY_{kind}"])
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        write_hyperparameters(writer, model.config)
        vocabulary.write(writer)
        weights = [(name, weight, "F32" if weight.ndim == 1 else kind) for name, weight in tensors(model)]
        weights = [(name, weight, gguf.GGMLQuantizationType[stored]) for name, weight, stored in weights]
        for name, weight, stored in weights:
            size = weight.numel() * gguf.GGML_QUANT_SIZES[stored][1]  # bytes
            writer.add_tensor_info(name, tuple(weight.shape), np.dtype(np.float32), size, stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, weight, stored in weights:
            values = weight.detach().float().contiguous().numpy()
            if stored.name == "F16" and np.abs(values).max() > LARGEST_F16:
                raise ValueError(f"{name} has numbers beyond {LARGEST_F16:g}, the largest of F16: take BF16 or F32")
            writer.write_tensor_data(gguf.quants.quantize(values, stored))
    finally:
        writer.close()
