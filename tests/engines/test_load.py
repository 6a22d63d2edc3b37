"""Checkpoints that are missing, truncated or do not fit: OSError or ValueError, never a half-loaded model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import skipstone
from skipstone import LayerSkip
from skipstone.engines.model_runner import ModelRunner
from skipstone.models.checkpoints import expect_fit
from tests.helpers import families, wrapped
from tests.helpers.pairwise import slow_except
from tests.helpers.settings import QUIET
from tests.helpers.support import alone, tokenizer

SKIP = LayerSkip(exit_layer=2)
Weights = dict[str, torch.Tensor]


def saved(model: Any, folder: Path, change: Callable[[Weights], Any] | None = None, **config: Any) -> Path:
    """A folder with a model and a tokenizer, whose weights and config were changed afterwards."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if change is not None:
        weights = load_file(folder / "model.safetensors")
        change(weights)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | config))
    return folder


def text_of(model: Any) -> list[int]:
    """What a model writes after some random tokens."""
    (row,) = skipstone.generate(model, families.prompts(1)[0][None], SKIP, max_new_tokens=12).new_tokens or []
    return row


class TestLoad:
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        families.cached("llama").save_pretrained(tmp_path)
        tokenizer().save_pretrained(tmp_path)
        return tmp_path

    def refusal(self, folder: Path) -> str:
        with pytest.raises(ValueError) as caught:
            skipstone.load(folder)
        assert str(folder) in str(caught.value)
        return str(caught.value)

    def test_a_sound_checkpoint_loads(self, folder: Path) -> None:
        model, words = skipstone.load(folder)
        assert not model.training
        output = skipstone.generate(model, "hello the", SKIP, tokenizer=words, max_new_tokens=6)
        assert (
            output.new_tokens
            == skipstone.generate(families.cached("llama"), "hello the", SKIP, tokenizer=words, max_new_tokens=6).new_tokens
        )

    @pytest.mark.parametrize("name", ["missing", "far/away/from/here", "./missing"])
    def test_a_missing_folder_is_an_os_error(self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.chdir(tmp_path)
        with pytest.raises(OSError, match=Path(name).name):
            skipstone.load(tmp_path / name if name == "missing" else name)

    def test_a_file_is_no_folder(self, folder: Path) -> None:
        with pytest.raises(OSError, match=r"a model is a folder.*model\.safetensors"):
            skipstone.load(folder / "model.safetensors")

    def test_a_folder_without_weights_is_an_os_error(self, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        with pytest.raises(OSError, match=r"model\.safetensors"):
            skipstone.load(folder)

    def test_a_tilde_is_the_home_folder(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder.parent))
        assert skipstone.load(f"~/{folder.name}")[0].config.num_hidden_layers == 4

    def test_flash_attention_and_devices_that_are_not_here(self, folder: Path) -> None:
        with pytest.raises(ValueError, match=r"flash_attention_2.? is not supported: load with attn_implementation='sdpa'"):
            skipstone.load(folder, attn_implementation="flash_attention_2")
        with pytest.raises(ValueError, match="device 'toaster' cannot be used here"):
            skipstone.load(folder, device="toaster")
        if not torch.cuda.is_available():
            with pytest.raises(ValueError, match="device 'cuda' cannot be used here"):
                skipstone.load(folder, device="cuda")

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
    def test_truncated_weights(self, share: float, folder: Path) -> None:
        weights = folder / "model.safetensors"
        data = weights.read_bytes()
        weights.write_bytes(data[: int(len(data) * share)])
        assert "corrupt" in self.refusal(folder)

    def test_weights_of_another_shape(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 16)
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        message = self.refusal(folder)
        assert "model.layers.1.mlp.up_proj.weight has shape [64, 16], expected [64, 32]" in message

    def test_missing_weights(self, folder: Path) -> None:
        weights = load_file(folder / "model.safetensors")
        del weights["model.layers.2.self_attn.q_proj.weight"]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        assert "it lacks model.layers.2.self_attn.q_proj.weight" in self.refusal(folder)

    @pytest.mark.parametrize("held", ["[1]", '"text"', "null", "3"])
    def test_a_config_that_is_no_object(self, held: str, folder: Path) -> None:
        (folder / "config.json").write_text(held)
        assert "config.json" in self.refusal(folder)

    @pytest.mark.parametrize(
        "change",
        [
            *({"num_key_value_heads": 3}, {"num_key_value_heads": 0}, {"num_attention_heads": -4}, {"vocab_size": 0}),
            *({"hidden_size": -32}, {"hidden_size": "32"}, {"num_hidden_layers": "24"}, {"num_hidden_layers": 0}),
            *({"max_position_embeddings": -5}, {"hidden_act": "wobble"}, {"rope_parameters": {"rope_type": "wobble"}}),
            *({"model_type": ["llama"]}, {"model_type": 3}, {"rope_parameters": 3}, {"dtype": "wobble"}),
        ],
        ids=str,
    )
    def test_a_wrong_value_of_the_config_is_named(self, change: dict[str, Any], folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(said | change))
        ((field, value),), refusal = change.items(), self.refusal(folder)
        value = value["rope_type"] if isinstance(value, dict) else value
        assert field in refusal or str(value) in refusal
        assert "config" in refusal

    @pytest.mark.parametrize("field", ["hidden_act", "rope_parameters"])
    def test_a_value_that_transformers_does_not_know_is_told_with_its_field(self, field: str, folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text())
        change = {"hidden_act": "wobble"} if field == "hidden_act" else {field: {"rope_type": "wobble", "rope_theta": 1e4}}
        (folder / "config.json").write_text(json.dumps(said | change))
        refusal = self.refusal(folder)
        assert field in refusal
        assert "wobble" in refusal
        assert "correct its config.json" in refusal

    @pytest.mark.parametrize(
        "damage",
        [{"pad_token_id": 10**6}, {"quantization_config": "x"}, {"text_config": "x"}, {"rms_norm_eps": -1.0}, {"head_dim": -8}],
        ids=str,
    )
    def test_what_makes_a_library_fail_in_any_way_is_a_sentence(self, damage: dict[str, Any], folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(said | damage))
        with pytest.raises(ValueError, match="correct"):
            ModelRunner(skipstone.load(folder)[0])

    @pytest.mark.parametrize("held", ["", '{"model_type": "lla', '{"a":' * 100_000])
    def test_a_config_that_cannot_be_read_is_to_be_corrected(self, held: str, folder: Path) -> None:
        (folder / "config.json").write_text(held)
        with pytest.raises((OSError, ValueError), match=r"config\.json of .*correct it, or fetch it again"):
            skipstone.load(folder)

    @pytest.mark.parametrize(
        "held", ["[]", "{}", '{"weight_map": {"a"', '{"metadata": {}, "weight_map": {"a": "b.safetensors"}}']
    )
    def test_an_index_that_is_none_or_names_missing_shards(self, held: str, folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(held)
        with pytest.raises((OSError, ValueError), match=rf"{folder.name}.*fetch its files again"):
            skipstone.load(folder)

    def test_a_missing_tokenizer_is_told_as_such(self, folder: Path) -> None:
        for file in folder.glob("*token*"):
            file.unlink()
        assert "tokenizer.json" in self.refusal(folder)

    @pytest.mark.parametrize("held", ["[1]", '{"a"', ""])
    def test_a_tokenizer_that_is_none(self, held: str, folder: Path) -> None:
        (folder / "tokenizer.json").write_text(held)
        assert "tokenizer" in self.refusal(folder)

    def test_too_little_memory_is_said_with_what_takes_less(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def allocate(*_: Any, **__: Any) -> None:
            torch.empty(1 << 60, dtype=torch.uint8)  # more than any address space

        monkeypatch.setattr(type(families.cached("llama")), "from_pretrained", allocate)
        with pytest.raises(RuntimeError, match=r"not enough memory for [\d.]+ GiB.*bfloat16.*quantize"):
            skipstone.load(folder)


TYPES = {
    "refused by name": ({"model_type": "mamba"}, "mamba keeps a recurrent state"),
    "unknown": ({"model_type": "foo"}, "does not know the model type 'foo'; `skipstone families` lists"),
    "no type": ({"hidden_size": 32}, "has no model_type, expected a type that `skipstone families` lists"),
    "an encoder-decoder": (
        {"model_type": "t5"},
        "transformers loads t5 models by neither AutoModelForCausalLM nor AutoModelForImageTextToText",
    ),
    "an encoder-decoder around pictures": ({"model_type": "florence2"}, "florence2 is an encoder-decoder"),
    "code of its own": (
        {"model_type": "foo", "auto_map": {"AutoConfig": "a.B"}},
        "brings modelling code of its own for the type 'foo'",
    ),
}


@pytest.mark.parametrize("case", TYPES)
def test_a_type_that_cannot_be_decoded_is_refused_before_its_weights_are_loaded(case: str, tmp_path: Path) -> None:
    said, words = TYPES[case]
    (tmp_path / "config.json").write_text(json.dumps(said))
    with pytest.raises(ValueError, match=words):
        skipstone.load(tmp_path)


@QUIET
@pytest.mark.parametrize("kind", slow_except(("qwen2_vl", "llama4"), [*wrapped.WRAPPERS]))
def test_a_multimodal_checkpoint_writes_the_text_of_transformers(kind: str, tmp_path: Path) -> None:
    """Llama 4 among them, of which transformers loads the text model alone and leaves what sees."""
    own, prompt = wrapped.build(kind), families.prompts(1)[0]
    saved(own, tmp_path)
    with wrapped.without_timm():
        model, words = skipstone.load(tmp_path)
    assert words.eos_token == "<eos>"
    out = skipstone.generate(model, prompt[None], SKIP, max_new_tokens=24)
    assert out.new_tokens == [alone(own, prompt, max_new_tokens=24, do_sample=False)]
    assert out.stats is not None
    assert out.stats.drafted > 0


def _biases(weights: Weights) -> None:
    weights.update({f"model.layers.{layer}.self_attn.q_proj.bias": torch.ones(32) for layer in range(4)})


SUPERFLUOUS: dict[str, tuple[Callable[[Weights], Any], str]] = {
    "biases that the config denies": (
        _biases,
        "it has model.layers.0.self_attn.q_proj.bias, model.layers.1.self_attn.q_proj.bias, "
        "model.layers.2.self_attn.q_proj.bias and 1 more, expected only what a LlamaForCausalLM of 4 layers",
    ),
    "a norm of another type": (
        lambda weights: weights.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
        "it has model.layers.0.self_attn.q_norm.weight, expected only",
    ),
    "a weight of nobody": (lambda weights: weights.update({"foo.bar": torch.ones(8)}), "it has foo.bar, expected only"),
    "a vision tower": (
        lambda weights: weights.update({"vision_model.layernorm.weight": torch.ones(8)}),
        "it has vision_model.layernorm.weight, expected only",
    ),
}


@pytest.mark.parametrize("case", SUPERFLUOUS)
def test_superfluous_weights_are_another_models(case: str, tmp_path: Path) -> None:
    change, words = SUPERFLUOUS[case]
    saved(families.cached("llama"), tmp_path, change)
    with pytest.raises(ValueError) as caught:
        skipstone.load(tmp_path)
    assert f"the checkpoint {tmp_path} does not fit its config: {words}" in str(caught.value)


def _last_layer_again(weights: Weights) -> None:
    last = {name: one for name, one in weights.items() if ".layers.3." in name}
    weights.update({name.replace(".layers.3.", ".layers.4."): one.clone() for name, one in last.items()})


def _predicting_layer(weights: Weights) -> None:
    _last_layer_again(weights)
    weights["model.layers.4.eh_proj.weight"] = torch.ones(8, 16)


def test_a_layer_too_many_is_none_that_predicts_further_tokens(tmp_path: Path) -> None:
    saved(families.cached("llama"), tmp_path, _last_layer_again, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"it has model\.layers\.4\..* and \d+ more, expected only what"):
        skipstone.load(tmp_path)


HARMLESS: dict[str, tuple[str, Callable[[Weights], Any], dict[str, Any]]] = {
    "rotary tables": (
        "llama", lambda weights: weights.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}), {},
    ),
    "masks": ("gptj", lambda weights: weights.update({
        "transformer.h.0.attn.bias": torch.ones(1, 1, 8, 8), "transformer.h.0.attn.masked_bias": torch.ones(1),
    }), {}),
    "layers that predict further tokens": ("llama", _predicting_layer, {"num_nextn_predict_layers": 1}),
    "a head of values": ("llama", lambda weights: weights.update({"v_head.summary.weight": torch.ones(1, 8)}), {}),
    "the same under their own name": ("llama", lambda weights: weights.update({"mtp.layers.0.norm.weight": torch.ones(8)}), {}),
    "the head of a tied model": (
        "llama", lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}),
        {"tie_word_embeddings": True},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HARMLESS)
def test_what_changes_no_text_may_be_there(case: str, tmp_path: Path) -> None:
    name, change, config = HARMLESS[case]
    own = families.build(name, **({"tie_word_embeddings": True} if "tied" in case else {}))
    assert text_of(skipstone.load(saved(own, tmp_path, change, **config))[0]) == text_of(own)


def test_a_layer_beyond_those_that_predict_further_tokens_is_superfluous(tmp_path: Path) -> None:
    def both_predict(weights: Weights) -> None:
        weights.update({f"model.layers.{layer}.eh_proj.weight": torch.ones(8, 16) for layer in (2, 3)})

    saved(families.cached("llama"), tmp_path, both_predict, num_hidden_layers=2, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=r"it has model\.layers\.3\..* of 2 layers"):
        skipstone.load(tmp_path)


def test_what_quantisers_leave_behind_loads() -> None:
    """AutoGPTQ wrote biases of zeros; others the scales of keys and values that skipstone keeps in full."""
    model = SimpleNamespace(config=SimpleNamespace(quantization_config={"quant_method": "gptq"}))
    model.config.get_text_config = lambda **_: SimpleNamespace(num_hidden_layers=4)
    report = {"unexpected_keys": {"model.layers.0.mlp.up_proj.bias", "model.layers.0.self_attn.k_scale"}}
    expect_fit("here", "llama", model, report)
    model.config.quantization_config["quant_method"] = "awq"
    with pytest.raises(ValueError, match=r"it has model\.layers\.0\.mlp\.up_proj\.bias, expected only"):
        expect_fit("here", "llama", model, report)
