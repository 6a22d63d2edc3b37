"""GGUF files hold a target and its draft: the weights that transformers has, under llama.cpp's names, and the tokenizer."""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import decoders, models, normalizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import skipstone
from skipstone.engines.model_runner import ModelRunner
from skipstone.export.draft import DraftLayers
from skipstone.export.gguf.vocabulary import vocabulary_of
from skipstone.export.gguf.write_gguf import DRAFT, TARGET, write_pair
from tests.helpers import conformance
from tests.helpers.byte_level import CORPUS, GGUF_NAMES, RULES, SIZE, TEXT, byte_level, plain, splitting
from tests.helpers.pairwise import round_robin, slow_except

EXIT = conformance.EXIT
FIRST = DraftLayers(tuple(range(EXIT)), 4)


def written(model: PreTrainedModel, folder: Path, kind: str = "F32", rule: str = "qwen2", keeps: DraftLayers = FIRST) -> Path:
    vocabulary = vocabulary_of(byte_level(rule), model)
    write_pair(ModelRunner(model, "eager"), vocabulary, keeps, folder, kind, "tiny")
    return folder


def weights(path: Path) -> dict[str, np.ndarray]:
    """The tensors of a file by name, float32, as gguf's own reader has them."""
    found = {}
    for one in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(one.data, one.tensor_type)
        found[one.name] = np.array(values, dtype=np.float32).reshape([int(size) for size in reversed(one.shape)])
    return found


def halves_apart(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a projection whose heads have their halves side by side, as transformers has them."""
    size = weight.shape[0] // heads
    order = np.concatenate(
        [np.concatenate([np.arange(0, size, 2), np.arange(1, size, 2)]) + head * size for head in range(heads)]
    )
    return weight[order]


def read_back(path: Path, config: Any, interleaved: bool) -> dict[str, torch.Tensor]:
    found = {}
    for name, values in weights(path).items():
        *place, part, end = name.split(".")
        if interleaved and part in ("attn_q", "attn_k"):
            values = halves_apart(values, config.num_attention_heads if part == "attn_q" else config.num_key_value_heads)
        prefix = f"model.layers.{place[1]}." if place else ""
        found[f"{prefix}{GGUF_NAMES[part]}.{end}"] = torch.from_numpy(values)
    return found


def field(path: Path, name: str) -> Any:
    return gguf.GGUFReader(path).fields[name].contents()


@round_robin(name=["llama", "qwen2", "qwen3", "smollm3"], tied=[False, True])
def test_both_files_hold_the_weights(name: str, tied: bool, tmp_path: Path) -> None:
    model = plain(name, tie_word_embeddings=tied)
    folder = written(model, tmp_path / "pair")
    for file, depth in ((TARGET, 4), (DRAFT, EXIT)):
        found = read_back(folder / file, model.config, interleaved=name in ("llama", "smollm3"))
        expected = {
            key: weight
            for key, weight in model.state_dict().items()
            if not (tied and key == "lm_head.weight") and not any(f"layers.{layer}." in key for layer in range(depth, 4))
        }
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], weight) for key, weight in expected.items())
        assert field(folder / file, f"{name}.block_count") == depth
        assert field(folder / file, f"{name}.attention.key_length") == model.model.layers[0].self_attn.head_dim
        assert field(folder / file, "general.architecture") == name


@pytest.mark.parametrize("name", slow_except(["llama"], ["llama", "qwen3"]))
@torch.no_grad()
def test_our_own_loader_reads_the_same_model(name: str, tmp_path: Path) -> None:
    model = plain(name)
    folder = written(model, tmp_path / "pair")
    ids = torch.tensor([[5, 17, 3, 60, 22, 9, 44, 120]])
    target, tokenizer = skipstone.load(folder / TARGET)
    draft, _ = skipstone.load(folder / DRAFT)
    torch.testing.assert_close(target(ids).logits, model(ids).logits)
    options: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False}
    for one, method in ((target, "autoregressive"), (draft, f"early_exit exit_layer={EXIT}")):
        theirs = skipstone.generate(one, ids, "autoregressive", **options).new_tokens
        assert theirs == skipstone.generate(model, ids, method, **options).new_tokens
    assert tokenizer(TEXT)["input_ids"] == byte_level("qwen2")(TEXT)["input_ids"]


@round_robin(rule=RULES, begins=[False, True])
@pytest.mark.slow
def test_the_tokenizer_is_in_the_file(rule: str, begins: bool, tmp_path: Path) -> None:
    model, tokenizer = plain("llama"), byte_level(rule, begins)
    folder = tmp_path / "pair"
    vocabulary = vocabulary_of(tokenizer, model)
    assert vocabulary.known
    write_pair(ModelRunner(model, "eager"), vocabulary, FIRST, folder, "F32", "tiny")
    tokens, types = (field(folder / DRAFT, f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    assert len(tokens) == len(types) == SIZE
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert len(set(tokens)) == SIZE
    kinds = gguf.TokenType
    assert [types[one] for one in (0, 1, 2, 50, tokenizer.convert_tokens_to_ids("<think>"), SIZE - 1)] == [
        *([kinds.CONTROL] * 3),
        *(kinds.NORMAL, kinds.USER_DEFINED, kinds.UNUSED),
    ]
    assert field(folder / DRAFT, "tokenizer.ggml.pre") == rule
    assert [field(folder / DRAFT, f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "padding")] == [0, 1, 2]
    assert field(folder / DRAFT, "tokenizer.ggml.add_bos_token") == begins
    assert field(folder / DRAFT, "tokenizer.ggml.add_eos_token") is False
    assert field(folder / DRAFT, "tokenizer.chat_template") == tokenizer.chat_template
    if rule != "smollm":  # transformers reads its files as GPT-2's
        theirs = skipstone.load(folder / TARGET)[1]
        for text in (*CORPUS, "<think>1234567</think> 12345"):
            assert theirs(text)["input_ids"] == tokenizer(text)["input_ids"]
            assert theirs.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) == text


@pytest.mark.parametrize(("kind", "dtype"), [("F16", torch.float32), ("BF16", torch.float32), ("BF16", torch.bfloat16)])
def test_half_precision_rounds_matrices_only_and_refuses_larger_numbers(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = plain("qwen2").to(dtype)
    model.generation_config.eos_token_id = [1, 7, 9]
    folder = written(model, tmp_path / "pair", kind)
    assert [field(folder / TARGET, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")] == [1, 7, 9]
    found = read_back(folder / TARGET, model.config, interleaved=False)
    half = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
    for key, weight in model.state_dict().items():
        expected = weight.float() if weight.ndim == 1 else weight.to(half).float()
        assert torch.equal(found[key], expected), key
    assert field(folder / TARGET, "general.file_type") == gguf.LlamaFileType[f"MOSTLY_{kind}"]
    if kind == "F16":
        model.model.layers[3].mlp.up_proj.weight.data[0, 0] = 1e5
        with pytest.raises(ValueError, match=r"blk\.3\.ffn_up\.weight has numbers beyond 65504"):
            written(model, tmp_path / "refused", kind)
        assert not (tmp_path / "refused").exists()


def test_llama_3_s_rotary_phases_are_factors(tmp_path: Path) -> None:
    """By the three cases of its released code: long waves are slowed down, short ones are not, between them a mixture."""
    rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"original_max_position_embeddings": 8192}
    model = plain("llama", head_dim=64, rope_parameters=rope, max_position_embeddings=131072)
    expected = []
    for pair in range(32):
        wave = 2 * math.pi * 500000.0 ** (2 * pair / 64)
        mixed = (8192 / wave - 1) / 3
        expected.append(1.0 if wave < 2048 else 32.0 if wave > 8192 else 1 / ((1 - mixed) / 32 + mixed))
    assert min(set(expected) - {1.0}) > 1.0
    folder = written(model, tmp_path / "pair")
    for file in (TARGET, DRAFT):
        found = torch.from_numpy(weights(folder / file)["rope_freqs.weight"])
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-5, atol=1e-5)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a family": ("gemma", {}, "no GGUF files of gemma models are written here, expected one of llama, qwen2"),
    "windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, "a sliding window"),
    "phases": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}},
        "rotary phases of the type 'yarn'",
    ),
    "biases": ("llama", {"attention_bias": True}, r"llama models have no model\.layers\.0\.self_attn\.\w_proj\.bias"),
    "layers without phases": ("smollm3", {"no_rope_layer_interval": 2}, "layers without rotary phases other than every 4th"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_llama_cpp_does_otherwise_is_refused(what: str, tmp_path: Path) -> None:
    name, fields, said = REFUSED[what]
    with pytest.raises(ValueError, match=said):
        written(plain(name, **fields), tmp_path / "pair")
    assert list(tmp_path.iterdir()) == [], "something half-written is left"


def _changed(part: str, value: Any) -> PreTrainedTokenizerFast:
    tokenizer = byte_level("qwen2")
    setattr(tokenizer.backend_tokenizer, part, value)
    return tokenizer


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("normalizer", normalizers.Lowercase(), "normalises texts by Lowercase"),
        ("decoder", decoders.Metaspace(), "over characters"),
        ("pre_tokenizer", splitting(r"\s+|\S+"), "by a rule of its own, and llama.cpp knows those of llama-bpe, qwen2, smollm"),
        ("model", models.WordLevel({"a": 0}, unk_token="a"), "of the type WordLevel"),
    ],
)
def test_other_tokenizers_are_refused(part: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        vocabulary_of(_changed(part, value), plain("llama"))


def test_a_rule_may_be_named_for_a_tokenizer_that_has_none() -> None:
    found = vocabulary_of(_changed("pre_tokenizer", splitting(r"\s+|\S+")), plain("llama"), "gpt-2")
    assert (found.rule, found.known) == ("gpt-2", False)
    assert vocabulary_of(byte_level("qwen2"), plain("llama"), "gpt-2").rule == "qwen2", "what is known is not overruled"


def test_more_tokens_than_embeddings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"has the id 300, and the model has embeddings of 100 ids"):
        vocabulary_of(byte_level("qwen2"), plain("llama", vocab=100))
