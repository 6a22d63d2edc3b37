"""Byte-level tokenizers that cut texts as well-known families do, and tiny models of the families that llama.cpp reads."""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tests.helpers import families

SIZE = 320  # ids of the models here: of the tokenizers, and some that no token has
TEXT = "def add(left, right):\n    return left + right  # they're 1234 sums, über\r\n\n\tnaïve 12 don't DON'T"
CORPUS = [TEXT, "the sum of two numbers is a number, and 100 of them are 100 numbers", "return left, returned right"]
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""llama.cpp's names of parameters, and transformers'."""


def splitting(regex: str) -> Any:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), bytes_only])


RULES: dict[str, Any] = {
    "llama-bpe": lambda: splitting(SPLIT % "{1,3}"),
    "qwen2": lambda: splitting(SPLIT % ""),
    "smollm": lambda: pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
}
"""How the tokenizers of Llama 3, Qwen 2 and 3, SmolLM 2 and GPT-2 cut texts."""


def byte_level(rule: str, begins: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer that was trained on CORPUS. begins: it puts <s> before a text."""
    core = Tokenizer(models.BPE(ignore_merges=rule == "llama-bpe"))
    core.pre_tokenizer, core.decoder = RULES[rule](), decoders.ByteLevel()
    if rule == "qwen2":
        core.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>", "<pad>"]
    core.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    )
    core.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    if begins:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template="{{ messages[0]['content'] }}",
    )


def plain(name: str, **fields: Any) -> PreTrainedModel:
    """A model as its GGUF file can have it: no windows, SmolLM3 as llama.cpp has it."""
    usual: dict[str, Any] = {"vocab": SIZE, "bos_token_id": 0, "eos_token_id": 1}
    if name in ("qwen2", "qwen3", "smollm3"):
        usual |= {"use_sliding_window": False, "sliding_window": None}
    if name == "qwen3":
        usual |= {"head_dim": 128}  # transformers' reader of GGUF files takes the default
    if name == "smollm3":
        usual |= {"no_rope_layer_interval": 4}
    return families.build(name, **{**usual, **fields})
