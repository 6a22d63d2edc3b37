"""A Llama of Hugging Face as a GGUF file for llama.cpp, with the same weights and without a tokenizer.

    pip install gguf
    python recipes/measure/to_gguf.py MODEL OUT.gguf [F32 | F16 | BF16 | Q8_0]

MODEL: a folder or hub id; "nano" is the bundled model. Norms stay float32.
"""

import argparse
from importlib import import_module
from typing import Any

import torch

import skipstone

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Parts of a layer: transformers' names and GGUF's."""


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The rows of a query or key projection in the order of llama.cpp's rotary phases: pairs beside each other."""
    size = weight.shape[0] // heads
    return weight.reshape(heads, 2, size // 2, -1).transpose(1, 2).reshape(weight.shape)


def main() -> None:
    gguf: Any = import_module("gguf")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("type", nargs="?", default="F32", choices=["F32", "F16", "BF16", "Q8_0"])
    asked = parser.parse_args()
    model, _ = skipstone.load(None if asked.model == "nano" else asked.model, dtype=torch.float32)
    config = model.config
    if config.model_type != "llama":
        raise SystemExit(f"{asked.model} is a {config.model_type}, expected a llama")
    kind = gguf.GGMLQuantizationType[asked.type]
    writer = gguf.GGUFWriter(asked.out, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if asked.type == "F32" else f"MOSTLY_{asked.type}"])
    writer.add_tokenizer_model("no_vocab")
    weights = model.state_dict()
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    for name, weight in weights.items():
        part = name.removeprefix("model.").removesuffix(".weight")
        if part.startswith("layers."):
            _, layer, part = part.split(".", 2)
            title = f"blk.{layer}.{NAMES[part]}"
        else:
            title = {"embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output"}[part]
        if part == "self_attn.q_proj":
            weight = interleaved(weight, config.num_attention_heads)
        elif part == "self_attn.k_proj":
            weight = interleaved(weight, config.num_key_value_heads)
        stored = gguf.GGMLQuantizationType.F32 if weight.ndim == 1 else kind
        writer.add_tensor(f"{title}.weight", gguf.quants.quantize(weight.numpy(), stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    main()
