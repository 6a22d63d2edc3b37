"""A model in a GGUF file is loaded, decoded and refused like one in a folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import skipstone
from skipstone.engines.loading import expect_config, load_model, load_tokenizer
from tests.helpers import commandline, families
from tests.helpers.gguf_names import NAMES
from tests.helpers.pairwise import slow_except

LAYERSKIP = skipstone.LayerSkip(exit_layer=2, num_speculative_tokens=3)


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp keeps the two halves of a rotated head side by side."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def written(path: Path, model: Any, packed: bool = False, architecture: str = "llama") -> Path:
    """A file as llama.cpp's converter writes it, with a tokenizer of single bytes. packed: matrices in Q8_0."""
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    tokens = [*(chr(code) for code in range(33, 33 + config.vocab_size - 1)), "AB"]
    writer.add_token_list([token if token.isprintable() else f"<{token!r}>" for token in tokens])
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["A B"])
    state = model.state_dict()
    for layer in range(-1, config.num_hidden_layers):
        for theirs, ours in NAMES.items():
            name = f"{ours}.weight" if layer < 0 else f"model.layers.{layer}.{ours}.weight"
            if (weight := state.get(name)) is None:
                continue
            if theirs in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if theirs == "attn_q" else config.num_key_value_heads
                weight = interleaved(weight, heads)
            values, place = weight.float().numpy(), theirs if layer < 0 else f"blk.{layer}.{theirs}"
            kind = gguf.GGMLQuantizationType.Q8_0
            if packed and values.ndim == 2:
                writer.add_tensor(f"{place}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(f"{place}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_file_is_the_model_that_was_written(tmp_path: Path) -> None:
    model = families.cached("llama")
    path = written(tmp_path / "tiny.gguf", model)
    found = load_model(path)
    assert found.dtype == torch.float32
    expected = model.state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in found.state_dict().items())
    expect_config(path)


@pytest.mark.parametrize("share", [0.0001, 0.002, 0.5, 0.99999])
def test_a_file_that_is_cut_off_is_said_to_be(share: float, tmp_path: Path) -> None:
    whole = written(tmp_path / "whole.gguf", families.cached("llama")).read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: max(5, int(share * len(whole)))])
    for attempt in (load_model, load_tokenizer) if share < 0.5 else (load_model,):
        with pytest.raises(ValueError, match=r"cut\.gguf is cut off.*fetch it again"):
            attempt(tmp_path / "cut.gguf")


@pytest.mark.parametrize("packed", slow_except([True], [False, True]))
def test_its_text_is_that_of_transformers(packed: bool, tmp_path: Path) -> None:
    """Unpacked weights are plain: every engine runs them."""
    path = written(tmp_path / "tiny.gguf", families.cached("llama"), packed)
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([[5, 17, 3, 60, 22]])
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name).eval()
    expected = theirs.generate(ids, max_new_tokens=20, do_sample=False)[0, 5:].tolist()
    for engine in ("eager", "auto"):
        model, tokenizer = skipstone.load(path, engine=engine)
        output = skipstone.generate(model, ids, LAYERSKIP, max_new_tokens=20, do_sample=False)
        assert output.new_tokens == [expected]
        assert tokenizer.decode(ids[0]) == "".join(chr(33 + token) for token in ids[0].tolist())
    same = torch.equal(theirs.model.layers[0].mlp.up_proj.weight, families.cached("llama").model.layers[0].mlp.up_proj.weight)
    assert same != packed


def test_the_command_line_takes_a_file(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf", families.cached("llama"))
    model, tokenizer = skipstone.load(path)
    text = skipstone.generate(model, "ABBA", LAYERSKIP, tokenizer=tokenizer, max_new_tokens=8, do_sample=False).text
    out = commandline.succeed(
        "generate",
        path,
        "--prompt",
        "ABBA",
        "--method",
        "layerskip exit_layer=2 num_speculative_tokens=3",
        "--max-new-tokens",
        "8",
    )
    assert text[0] in out.stdout


def test_a_file_that_is_none_is_an_os_error(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04 and so on")
    for attempt in (skipstone.load, load_tokenizer, expect_config):
        with pytest.raises(OSError, match=r"not a GGUF file, it begins with b'PK.*expected b'GGUF'.*model\.gguf"):
            attempt(path)


def test_an_architecture_that_transformers_does_not_know_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "tiny.gguf", families.cached("llama"), architecture="plamo")
    with pytest.raises(ValueError, match=r"tiny\.gguf cannot be loaded.*plamo"):
        load_model(path)
    with pytest.raises(ValueError, match=r"tiny\.gguf cannot be loaded.*plamo"):
        load_tokenizer(path)


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_a_missing_package_is_one_sentence(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "tiny.gguf", families.cached("llama"))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf'^GGUF files need {package}: pip install "skipstone\[quantised\]"$'):
        load_model(path)
