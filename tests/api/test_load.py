"""Checkpoints that are missing, truncated or do not fit: OSError or ValueError, never a half-loaded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import skipstone
from skipstone import LayerSkip
from tests.helpers import families
from tests.helpers.support import tokenizer

SKIP = LayerSkip(exit_layer=2)


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

    def test_more_layers_than_the_config_says(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
        assert "it has model.layers.3." in self.refusal(folder)

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

    def test_a_config_that_is_no_json(self, folder: Path) -> None:
        (folder / "config.json").write_text('{"model_type": "lla')
        with pytest.raises(OSError, match=r"config\.json"):
            skipstone.load(folder)

    def test_an_unknown_architecture(self, folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "model_type": "llamoid"}))
        with pytest.raises(ValueError, match="llamoid"):
            skipstone.load(folder)


TYPES = {
    "refused by name": ({"model_type": "mamba"}, "mamba keeps a recurrent state"),
    "unknown": ({"model_type": "foo"}, "does not know the model type 'foo'; `skipstone families` lists"),
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
