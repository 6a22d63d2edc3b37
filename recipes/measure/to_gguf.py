"""Writes a model as a GGUF file for llama.cpp, with the same weights and without a tokenizer.

    pip install gguf
    python recipes/measure/to_gguf.py MODEL OUT.gguf [F32 | F16 | BF16 | Q8_0]

MODEL: a folder or hub id; "nano" is the bundled model. Norms stay float32. `skipstone export --to gguf` also writes tokenizers,
but no Q8_0.
"""

import argparse
from importlib import import_module
from typing import Any

import torch

import skipstone
from skipstone.export.gguf.architecture import expect_architecture, tensors, write_hyperparameters


def main() -> None:
    gguf: Any = import_module("gguf")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("type", nargs="?", default="F32", choices=["F32", "F16", "BF16", "Q8_0"])
    args = parser.parse_args()
    model, _ = skipstone.load(None if args.model == "nano" else args.model, dtype=torch.float32)
    try:
        expect_architecture(model.config)
    except ValueError as error:
        raise SystemExit(str(error)) from None
    matrix_type = gguf.GGMLQuantizationType[args.type]
    writer = gguf.GGUFWriter(args.out, model.config.model_type)
    write_hyperparameters(writer, model.config)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if args.type == "F32" else f"MOSTLY_{args.type}"])
    writer.add_tokenizer_model("no_vocab")
    for name, weight in tensors(model):
        stored = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else matrix_type
        writer.add_tensor(name, gguf.quants.quantize(weight.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
